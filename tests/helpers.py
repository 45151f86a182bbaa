"""Small models, batches and short calls that tests of several rooms begin with.

Names give the sizes: `net_8_16_4` has 8 inputs, 16 hidden units and 4 outputs; `inputs_8` are batches for it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from oracles import randomise_, unflatten
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

import fishleg
from fishleg import FineTuningOptions, PruningOptions, PruningSession, Surgeon
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.pruning import Event

Batch = tuple[Tensor, Tensor]

# Options of a pruning that takes little time.
QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 4}
QUICKER: dict[str, Any] = {"samples": 8, "sub_batch": 8}
QUICK_DIGITS: dict[str, Any] = {"samples": 16, "sub_batch": 8, "batchnorm_batches": 2}
QUICK_ROWS: dict[str, Any] = {"samples": 8, "sub_batch": 4, "measure_batches": 1, "batchnorm_batches": 2}
SHORT_TRAINING: dict[str, Any] = {"steps": 4, "update_every": 2}
QUICK_GRADUAL: dict[str, Any] = {**QUICK_DIGITS, "refine_steps": 3}
DIGITS_WEIGHTS = 72 + 1152 + 4608 + 320  # prunable weights of DigitsNet(8)

X12 = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
X20 = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y20 = torch.arange(20) % 3
EXAMPLES_8 = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net_8_16_4() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def net_6_10_4(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), activation(), nn.Linear(10, 4))


def net_6_12_8(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, outputs))


def net_6_8_3() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def net_4_6_3(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 3))


def small_conv_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def net_with_dropout(*, dropout: float = 0.0) -> nn.Sequential:
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)]
    torch.manual_seed(0)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return nn.Sequential(*layers)


def net_with_batchnorm() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4, eps=1e-9), nn.Tanh(), nn.Linear(4, 3)
    model = nn.Sequential(*layers).double()
    x = torch.randn(256, 5, dtype=torch.float64)
    model.train()(2 * x + 1)  # running statistics that are not those of any batch
    return model.eval()


def net_with_two_norms() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 4),
    )  # fmt: skip
    for i in (1, 4):
        nn.init.constant_(model[i].bias, 0.5)  # a ReLU that is open for channels without input
    return model


def conv_net_with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    with torch.no_grad():
        for norm in (model[1], model[4]):
            norm.bias.normal_()
    return model


def trained_net_with_batchnorm() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A trained classifier with a BatchNorm, and its data, ordered by class."""
    torch.manual_seed(0)
    y = torch.arange(1600) * 4 // 1600
    x = torch.randn(1600, 8) + 3 * torch.eye(8)[y]
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        i = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x[i]), y[i]).backward()
        optimizer.step()
    return model.eval(), x, y


class TwoHeads(nn.Module):
    """Two output layers, as a pair or side by side."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        self.f, self.a, self.b, self.joined = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), joined

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.f(x).relu()
        return torch.cat([self.a(h), self.b(h)], 1) if self.joined else (self.a(h), self.b(h))


class BagOfWords(nn.Module):
    """The sum of some words' vectors; the first is padding."""

    def __init__(self, padding: float = 0.0) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 8, padding_idx=0), nn.Linear(8, 4)
        with torch.no_grad():
            self.words.weight[0] = padding

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).sum(1))


def inputs_8(count: int = 4, size: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


def labelled_8() -> list[tuple[Tensor, Tensor]]:
    return [(x, x[:, :4].argmax(1)) for x in inputs_8()]


def inputs_6(count: int = 4, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, size, 6, generator=generator))


def labelled_6() -> list[tuple[Tensor, Tensor]]:
    return [(x, x[:, :4].argmax(1)) for x in inputs_6()]


def training_batches(count: int = 6) -> list[Batch]:
    inputs = torch.randn(count, 32, 6, generator=torch.Generator().manual_seed(0))
    return [(x, x[:, :4].argmax(1)) for x in inputs]


def batches_of_5(size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 5, dtype=torch.float64, generator=generator) for _ in range(4)]


def image_batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [(draw(16, 2, 6, 6), torch.randint(3, (16,), generator=generator)) for _ in range(count)]


def random_images() -> list[Tensor]:
    return [torch.rand(16, 1, 8, 8)]


def sentences(words: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, words, (16, 10), generator=generator) for _ in range(6)]


def quiet(_: str) -> None:
    pass


PRUNE_KEYWORDS = set(inspect.signature(fishleg.prune).parameters)


def prune_with(model: nn.Module, data: Any, sparsity: Any, **keywords: Any) -> Any:
    """prune() without progress; what are not its own keywords become fields of PruningOptions."""
    own = {
        name: value
        for name, value in keywords.items()
        if name in PRUNE_KEYWORDS - {"pattern", "method", "exclude"}
    }
    options = PruningOptions(**{name: value for name, value in keywords.items() if name not in own})
    return fishleg.prune(model, data, sparsity, options=options, **{"progress": quiet, **own})


def quick_prune(model: nn.Module, data: list[Any], sparsity: float | None = 0.5, **keywords: Any) -> Any:
    return prune_with(model, data, sparsity, **{**QUICK, **keywords})


def run_gradually(
    model: nn.Module,
    loader: Any,
    sparsities: list[float],
    fine_tuning: FineTuningOptions,
    options: PruningOptions | None = None,
    on_event: Callable[[Event], None] = quiet,
    **given: Any,
) -> Surgeon:
    """Prune and train in turns with a `PruningSession`, and return its surgeon."""
    session = PruningSession(model, loader, options=options, fine_tuning=fine_tuning, **given)
    for event in session.run(sparsities):
        on_event(event)
    return session.surgeon


def prune_by_magnitude(model: nn.Module, sparsity: float, **keywords: Any) -> Any:
    given = {"mode": "one-shot", "method": "magnitude", "compensation": "none", **keywords}
    return prune_with(model, inputs_8(3), sparsity, **given)


def train_8(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for x in inputs_8(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        for optimizer in optimizers:
            optimizer.step()


def train_20(
    model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, steps: int = 1, x: Tensor = X20
) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), Y20)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def one_sgd_per_layer(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]


def random_inverse(
    structure: str = "eigen-kronecker", model: nn.Module | None = None, **options: object
) -> InverseFisher:
    inverse = InverseFisher.from_model(model or small_conv_net(), structure, **options)
    return randomise_(inverse, torch.Generator().manual_seed(0))


def dense_inverse(inverse: InverseFisher, model: nn.Module) -> Tensor:
    """Q [n, n] over all parameters in the model's order, from each layer's dense block, entry by entry."""
    n = sum(p.numel() for p in model.parameters())
    where, Q = unflatten(torch.arange(n), dict(model.named_parameters())), torch.zeros(n, n)
    for name, layer in inverse.layers.items():
        index = layer.pack(where).flatten()
        Q[index[:, None], index] = inverse.operator(name).dense().detach().double()
    return Q


def random_masks(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters() if name != "2.bias"}


def state_copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def zeros_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p == 0 for name, p in model.named_parameters() if p.dim() > 1}
