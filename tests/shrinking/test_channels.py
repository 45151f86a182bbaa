"""Which channels can be removed: the same outputs and the expected sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shrink_checks import Lambda, Residual, check_shrunk, remove
from torch import Tensor, nn
from torch.nn import functional

from fishleg import load_shrunk, shrink
from fishleg.workloads.digits_net import DigitsNet
from reproduction.workloads.networks import ResNet18, resnet20


@torch.no_grad()
def scramble(model: nn.Module) -> nn.Module:
    """BatchNorms whose every number matters."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model


class Joined(nn.Module):
    """Feature maps side by side, flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 3, 1)
        self.norm = nn.BatchNorm2d(7)
        self.last = nn.Linear(7 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.max_pool2d(self.norm(torch.cat([self.a(x), self.b(x)], 1)), 2)
        return self.last(y.flatten(1))


class Squeezed(nn.Module):
    """Depthwise convolution, squeeze and excitation, a scale per channel, a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(2, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.gate = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))
        self.activation = nn.PReLU(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(functional.relu6(self.expand(x)))
        y = self.activation(y * self.gate(y.mean((2, 3)))[:, :, None, None].sigmoid() * self.scale)
        return self.last(y.flatten(2).transpose(1, 2)).mean(1)


class Block(nn.Module):
    """A transformer's: attention, LayerNorm, and the two linear layers in which rows can go."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x + self.down(functional.gelu(self.up(x)))).mean(1))


class Twice(nn.Module):
    """One layer used twice: its columns read the inputs once and its own rows once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(functional.relu(self.inner(x))))


class Padded(nn.Module):
    """A shortcut with more channels, by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.a(x))
        return self.last(functional.pad(y, (1, 1)) + self.b(y))


class Parts(nn.Module):
    """A gated unit: halves of one layer's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Linear(4, 12), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.wide(x).chunk(2, dim=-1)
        return self.last(value * torch.sigmoid(gate))


def test_rows_go_with_the_columns_that_read_them() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    remove(model, "0", [0, 3, 7])
    remove(model, "2", [1])
    check_shrunk(
        model, torch.randn(4, 5).double(), {"0.weight": (5, 5), "2.weight": (5, 5), "4.weight": (3, 5)}
    )


def test_rows_without_a_reader_are_removed_even_if_not_zero() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[4].weight[:, 2] = 0  # row 2 of the layer before is not read, nor is what it alone reads
        model[2].weight[:, 5] = 0
        model[2].weight[2, 5] = 1
    check_shrunk(
        model, torch.randn(4, 5).double(), {"0.weight": (7, 5), "2.weight": (5, 7), "4.weight": (3, 5)}
    )


def test_channels_that_become_nonzero_are_kept() -> None:
    """f(0) ≠ 0, a bias, or BatchNorm's mean or shift."""
    x = torch.randn(4, 5).double()
    sigmoid = nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 3))
    remove(sigmoid, "0", [1, 2])
    biased = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        biased[0].weight[1:3] = 0
    for model in (sigmoid, biased):
        with pytest.raises(ValueError, match=r"nothing can be cut out: 2 rows of 0\.weight are zero, but"):
            shrink(model.double(), x)
    images = torch.randn(2, 2, 4, 4).double()
    for part in ("bias", "running_mean"):
        normed = nn.Sequential(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 1))
        remove(normed, "0", [0, 1])
        with torch.no_grad():
            getattr(normed[1], part)[1] = 1.0
        check_shrunk(normed, images, {"0.weight": (5, 2, 3, 3), "2.weight": (3, 5, 1, 1)})


def test_batchnorm_scale_and_shift_of_zero_remove_a_channel() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.Flatten())
    scramble(model)
    with torch.no_grad():
        model[1].weight[[1, 4]] = model[1].bias[[1, 4]] = 0
    small = check_shrunk(
        model, torch.randn(2, 2, 4, 4).double(), {"0.weight": (4, 2, 3, 3), "3.weight": (3, 4, 1, 1)}
    )
    assert small[0].out_channels == small[1].num_features == small[3].in_channels == 4
    assert small[1].running_mean.shape == (4,)


def test_terms_of_a_sum_go_together() -> None:
    model = Residual()
    remove(model, "first", [0, 1, 2])
    remove(model, "second", [1, 2, 5])
    expected = {"first.weight": (4, 5), "second.weight": (4, 5), "last.weight": (3, 4)}
    check_shrunk(model, torch.randn(4, 5).double(), expected)


def test_feature_maps_side_by_side_and_flattened() -> None:
    model = scramble(Joined())
    remove(model, "a", [0, 2])
    remove(model, "b", [1])
    with torch.no_grad():
        for i in (0, 2, 5):
            model.norm.weight[i] = model.norm.bias[i] = 0
    expected = {"a.weight": (2, 2, 3, 3), "b.weight": (2, 2, 1, 1), "last.weight": (3, 16)}
    check_shrunk(model, torch.randn(2, 2, 4, 4).double(), expected)


def test_depthwise_gates_scales_and_slopes() -> None:
    model = Squeezed()
    remove(model, "expand", [1, 2])
    remove(model, "depthwise", [2])  # channel 1 has a bias there: it is not zero
    remove(model, "gate", [2])
    expected = {
        "expand.weight": (5, 2, 1, 1), "depthwise.weight": (5, 1, 3, 3), "gate.weight": (5, 5),
        "scale": (5, 1, 1), "last.weight": (3, 5),
    }  # fmt: skip
    small = check_shrunk(model, torch.randn(2, 2, 4, 4).double(), expected)
    assert small.depthwise.groups == small.activation.num_parameters == 5


def test_a_transformer_loses_rows_between_its_linear_layers_only(caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    remove(model, "up", [0, 1, 2, 3])
    remove(model, "down", [5])  # added to the stream that LayerNorm reads
    with caplog.at_level(logging.WARNING):
        check_shrunk(model, torch.randn(2, 3, 8).double(), {"up.weight": (8, 8), "down.weight": (8, 8)})
    assert "1 rows of down.weight are zero but are kept" in caplog.text


def test_a_layer_that_is_used_twice() -> None:
    model = Twice()
    remove(model, "inner", [1])
    with pytest.raises(ValueError, match=r"1 rows of inner\.weight are zero, but"):
        shrink(model, torch.randn(2, 4))  # its columns read the inputs, too


def test_zeros_that_pad_a_shortcut_hold_what_is_added_to_them() -> None:
    model = Padded()
    remove(model, "a", [0])
    remove(model, "b", [0, 1, 5])  # 0 and 5 meet the padding, 1 meets row 0 of a
    expected = {"a.weight": (3, 3), "b.weight": (5, 3), "last.weight": (2, 5)}
    check_shrunk(model, torch.randn(2, 3).double(), expected)


def test_halves_of_a_layer_go_together() -> None:
    model = Parts()
    remove(model, "wide", [2, 9])  # a zero value, and a zero gate, which is open
    check_shrunk(model, torch.randn(3, 4).double(), {"wide.weight": (10, 4), "last.weight": (2, 5)})


def test_grouped_convolutions_stay() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten())
    remove(model, "0", [1])
    with pytest.raises(ValueError, match=r"1 rows of 0\.weight are zero, but"):
        shrink(model, torch.randn(2, 2, 3, 3))


def test_no_layer_is_emptied() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    remove(model, "0", list(range(8)))
    check_shrunk(model, torch.randn(4, 5).double(), {"0.weight": (1, 5), "2.weight": (3, 1)})


def test_the_models_own_outputs_stay() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    remove(model, "2", [1])
    with pytest.raises(ValueError, match=r"nothing can be cut out: 1 rows of 2\.weight"):
        shrink(model, torch.randn(4, 5))


@pytest.mark.parametrize("make", [DigitsNet, resnet20, lambda: ResNet18(width=8)])
def test_networks_with_random_rows_removed(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = scramble(make()).double().eval()
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, module in modules.items():
            if name.endswith(("conv1", "conv2", "conv3")):
                gone = torch.rand(len(module.weight)) < 0.4
                norm: Any = modules[name.replace("conv", "bn")]
                module.weight[gone] = norm.weight[gone] = norm.bias[gone] = 0
    x = torch.randn(2, 1 if isinstance(model, DigitsNet) else 3, 16, 16).double()
    small = shrink(model, x)
    with torch.no_grad():
        assert torch.allclose(small(x), model(x), atol=1e-12)
    assert sum(p.numel() for p in small.parameters()) < 0.75 * sum(p.numel() for p in model.parameters())
    loaded = load_shrunk(make().double().eval(), small.state_dict())
    assert torch.equal(loaded(x), small(x))


def overwritten(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    alias = functional.dropout(h, 0.1, training=False)
    h += functional.relu(m.b(x))
    return m.o(alias)


def changed_in_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.view(-1, 2, 4).sigmoid_()
    return m.o(h)


def assigned(m: Any, x: Tensor) -> Tensor:
    h, c = m.a(x), functional.relu(m.b(x))
    h[:, 0] = c[:, 0]
    return m.o(h)


def pooled(m: Any, x: Tensor) -> Tensor:
    return m.o(functional.max_pool1d(functional.relu(m.a(x))[:, None], 3, 1, 1)[:, 0])


def rolled(m: Any, x: Tensor) -> Tensor:
    return m.o(functional.relu(m.a(x)).roll(2, 1))


def spread(m: Any, x: Tensor) -> Tensor:
    return m.o(functional.softplus(m.a(x)) + m.b(x)[:, :1] * m.g)


@pytest.mark.parametrize("f", [overwritten, changed_in_a_view, assigned, pooled, rolled, spread])
def test_channels_that_are_zero_on_one_batch_only_are_kept(f: Callable[[Any, Tensor], Tensor]) -> None:
    """On the batch that is shown, what is added to the zero rows is zero; on others it is not."""
    model = Lambda(f).double()
    remove(model, "a", [0, 1, 7])
    with torch.no_grad():
        model.b.bias -= 3
        model.a.bias[[2, 6]] -= 3
    shown = 0.01 * torch.randn(2, 6).double()
    with pytest.raises(ValueError, match="nothing can be cut out"):
        shrink(model, shown)


def test_operations_that_move_channels_keep_them() -> None:
    def sliced(m: Any, x: Tensor) -> Tensor:
        return m.o(torch.cat([functional.relu(m.a(x))[:, 2:6], functional.relu(m.b(x))[:, :4]], 1))

    model = Lambda(sliced, wide=4).double()
    remove(model, "a", [3])
    remove(model, "b", [3])  # a[:, 2:6] of fewer channels would be others; b[:, :4] is all of b
    x = torch.randn(2, 6).double()
    small = shrink(model, x)
    assert torch.allclose(small(x), model(x))
    assert [len(small.a.weight), len(small.b.weight)] == [8, 3]
