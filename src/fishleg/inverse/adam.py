"""Adam on the parameters λ of Q."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.operators import Kronecker
from fishleg.inverse.warm_start import WarmStart
from fishleg.options import AuxiliaryOptions


def make_adam(
    inverse: InverseFisher, warm_starts: Iterable[WarmStart], options: AuxiliaryOptions
) -> torch.optim.Adam:
    """Make an Adam optimizer for the part of λ that Adam moves.

    E² is not part of it where it is a running average. The bases L and R of such a layer get a smaller
    learning rate: the noise of a gradient turns a k×k basis by about √k times Adam's step, hence lr/√k.

    Args:
        inverse: Q.
        warm_starts: The warm starts of its layers.
        options: The options of the learning.

    Returns:
        The optimizer. Each parameter group has a `factor` that multiplies the learning rate.
    """
    factors: dict[nn.Parameter, float] = {}
    for warm_start in warm_starts:
        operator = warm_start.operator
        if warm_start.averages_eigenvalues and isinstance(operator, Kronecker):
            for side in (operator.L, operator.R):
                factors.update((p, max(p.shape[-1], 1) ** -0.5) for p in side.parameters() if p.dim() > 1)
            if operator.log_e is not None:
                factors[operator.log_e] = 0.0
    groups: dict[float, list[nn.Parameter]] = {}
    for p in inverse.parameters():
        if p.requires_grad and factors.get(p, 1.0) > 0:
            groups.setdefault(factors.get(p, 1.0), []).append(p)
    return torch.optim.Adam(
        [{"params": group, "factor": factor} for factor, group in groups.items()]
        or [{"params": [nn.Parameter(torch.zeros(1))], "factor": 1.0}],  # Adam refuses an empty list
        lr=options.lr,
        betas=options.betas,
        fused=True,
    )


def adam_step(adam: torch.optim.Adam, loss: Tensor, lr: float) -> None:
    """Take one step of Adam on a loss. A loss without gradient changes nothing.

    Args:
        adam: The optimizer that `make_adam` returned.
        loss: The auxiliary loss, a scalar tensor.
        lr: The learning rate, before the factors of the parameter groups.

    Raises:
        ValueError: A gradient is not finite. λ is then unchanged.
    """
    if not loss.requires_grad:
        return
    parameters = [p for group in adam.param_groups for p in group["params"]]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    norms = torch._foreach_norm([g for g in gradients if g is not None])
    if not bool(torch.stack([norm.double() for norm in norms]).isfinite().all()):
        raise ValueError("non-finite gradient of the auxiliary loss; Q is unchanged")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.stride() != parameter.stride():
            # The fused kernel ignores strides and would read this gradient transposed.
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    for group in adam.param_groups:
        group["lr"] = lr * group["factor"]
    adam.step()
    adam.zero_grad(set_to_none=True)
