"""Slow, obvious versions of what the library computes: from the definitions, and without its code."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, distributions, nn

# --- output Fisher: E_y[s sᵀ], s = ∇_f log p(y|f), for one unit f [outputs] ---------------------------------


def _expected_score_outer(outcomes: list[tuple[float, Tensor]]) -> Tensor:
    return sum(weight * torch.outer(score, score) for weight, score in outcomes)


def _score(log_p: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    leaf = f.detach().clone().requires_grad_()
    return torch.autograd.grad(log_p(leaf), leaf)[0]


def categorical_fisher(f: Tensor) -> Tensor:
    p = f.softmax(-1)
    scores = [_score(lambda x, y=y: x.log_softmax(-1)[y], f) for y in range(len(f))]
    return _expected_score_outer([(float(p[y]), s) for y, s in enumerate(scores)])


def bernoulli_fisher(f: Tensor) -> Tensor:
    outcomes = []
    for bits in torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=f.dtype)] * len(f)).view(-1, len(f)):
        weight = distributions.Bernoulli(logits=f).log_prob(bits).sum().exp()
        score = _score(lambda x, y=bits: distributions.Bernoulli(logits=x).log_prob(y).sum(), f)
        outcomes.append((float(weight), score))
    return _expected_score_outer(outcomes)


def gaussian_fisher(f: Tensor, sigma: float | Tensor = 1.0) -> Tensor:
    return torch.diag((1 / torch.as_tensor(sigma, dtype=f.dtype) ** 2).expand(len(f)))


def learned_sigma_fisher(f: Tensor) -> Tensor:
    log_sigma = f[len(f) // 2 :]
    return torch.diag(torch.cat([torch.exp(-2 * log_sigma), torch.full_like(log_sigma, 2.0)]))


# --- the Fisher matrix of a model ---------------------------------------------------------------------------


def trainable_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def flat_gradient(value: Tensor, parameters: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(
        value, parameters, retain_graph=True, materialize_grads=True, allow_unused=True
    )
    return torch.cat([g.flatten() for g in found])


def dense_fisher(
    model: nn.Module,
    x: Tensor,
    output_fisher: Callable[[Tensor], Tensor],
    keep: Tensor | None = None,
    class_dim: int = -1,
) -> Tensor:
    """mean over kept units of JᵀΛJ, J by one backward for each output; parameters in their own order."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    f = model(x).movedim(class_dim, -1).flatten(0, -2)  # [units, outputs]
    F, count = 0.0, 0
    for unit in range(len(f)):
        if keep is not None and not keep.flatten()[unit]:
            continue
        J = torch.stack([flat_gradient(f_k, parameters) for f_k in f[unit]])
        F, count = F + J.T @ output_fisher(f[unit].detach()) @ J, count + 1
    for module, mode in modes:
        module.training = mode
    return F / count


def dense_ggn_product(F: Tensor, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """F·v with v a dict in the order of F's parameters."""
    return unflatten(F @ flatten(v), v)


def flatten(v: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in v.values()])


def unflatten(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([value.numel() for value in like.values()])
    return {name: part.view_as(value) for part, (name, value) in zip(parts, like.items(), strict=True)}


def random_like_parameters(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


# --- the auxiliary loss and matrices to learn ---------------------------------------------------------------


def dense_auxiliary_loss(Q: Tensor, F: Tensor, gamma: float) -> Tensor:
    """½ Tr(Q F_γ Q) − Tr Q, least at Q = (F+γI)⁻¹."""
    return 0.5 * torch.trace(Q @ (F + gamma * torch.eye(len(F), dtype=F.dtype)) @ Q) - torch.trace(Q)


def damped_inverse(F: Tensor, gamma: float) -> Tensor:
    return torch.linalg.inv(F + gamma * torch.eye(len(F), dtype=F.dtype))


def random_fisher(n: int, generator: torch.Generator) -> Tensor:
    """A positive-definite matrix with eigenvalues spread over about two decades."""
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    spectrum = torch.exp(-3 * torch.rand(n, generator=generator, dtype=torch.float64))
    return (basis * spectrum) @ basis.T


def exact_samples(F: Tensor) -> Tensor:
    """n rows h with HᵀH/n = F exactly: √n · (U√Λ)ᵀ."""
    spectrum, basis = torch.linalg.eigh(F)
    return len(F) ** 0.5 * (basis * spectrum.clamp(min=0).sqrt()).T


def randomise_(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Random parameters, well conditioned for every seed: I + A/(2‖A‖) for factors, small logarithms."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if name.rpartition(".")[2] in ("matrix", "channel", "position"):
                norm = torch.linalg.matrix_norm(noise, 2, keepdim=True)
                noise = torch.eye(p.shape[-1], dtype=torch.float64) + 0.5 * noise / norm
            elif name.rpartition(".")[2].startswith("log_"):
                noise = 0.4 * noise
            p.copy_(noise)
    return module


def packed_fisher(model: nn.Module, F: Tensor, names: tuple[str, ...]) -> Tensor:
    """The block of F of one layer, ordered as the layer is packed: row by row, the bias last in each row."""
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    index = dict(zip(trainable_names(model), torch.arange(len(F)).split(sizes), strict=True))
    parts = [index[name] for name in names]
    if len(parts) == 2:  # [n_out · n_in] and [n_out] → [n_out, n_in + 1]
        parts = [torch.cat([parts[0].view(len(parts[1]), -1), parts[1][:, None]], 1).flatten()]
    order = torch.cat(parts)
    return F[order][:, order]


# --- states -------------------------------------------------------------------------------------------------


def identical(a: object, b: object) -> bool:
    """Bit for bit the same, inside nested dicts, lists and tuples of tensors and numbers."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(identical(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b
