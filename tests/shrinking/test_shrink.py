"""shrink() and load_shrunk(): the model stays as it is, and models that cannot be shrunk are refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from shrink_checks import Lambda, Residual, check_shrunk, remove, sizes
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.prune import random_unstructured

from fishleg import load_shrunk, shrink


def test_the_model_is_left_alone_and_the_copy_can_be_trained() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    model = model.to(memory_format=torch.channels_last)
    model[4].weight.requires_grad_(False)
    with torch.no_grad():
        model[1].weight[:2] = model[1].bias[:2] = 0
    before = copy.deepcopy(model.state_dict())
    model.train()
    x = torch.randn(3, 1, 4, 4)
    small = shrink(model, (x, torch.zeros(3)))
    assert model.training
    assert small[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert small[0].weight.is_contiguous(memory_format=torch.channels_last)
    small(x).sum().backward()
    assert small[0].weight.grad.shape == (4, 1, 3, 3)


def test_a_call_of_ones_own_and_keyword_arguments() -> None:
    model = Residual()
    remove(model, "first", [0])
    remove(model, "second", [0])
    x = torch.randn(2, 5)
    for batch, forward in (({"x": x}, None), ([1, x], lambda m, b: m(b[1]))):
        small = shrink(model, batch, **({} if forward is None else {"forward": forward}))
        assert torch.allclose(small(x), model(x), atol=1e-6)
        assert small.first.out_features == small.last.in_features == 5


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 4, 3), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).view(-1, 16))


class Depends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if bool(x.sum() > 0) else self.a(-x)


def test_models_that_cannot_be_shrunk_are_refused() -> None:
    written = Written()
    remove(written, "conv", [0, 1])
    with pytest.raises(ValueError, match="its code contains a fixed size"):
        shrink(written, torch.randn(2, 1, 4, 4))
    with pytest.raises(ValueError, match=r"torch\.export cannot trace the model"):
        shrink(Depends(), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r'no row of a weight is zero .* \(pattern="rows"'):
        shrink(Residual(), torch.randn(2, 5))


def test_a_state_that_is_no_part_of_the_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    larger = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    with pytest.raises(ValueError, match=r"0.weight has shape \(9, 5\) .* must not exceed \(8, 5\)"):
        load_shrunk(model, larger.state_dict())
    assert sizes(model) == {"0.weight": (8, 5), "2.weight": (3, 8)}
    missing = {name: value for name, value in model.state_dict().items() if name != "0.bias"}
    with pytest.raises(ValueError, match=r"only one of the two has 0\.bias"):
        load_shrunk(model, missing)


def scaled_by_width(m: Any, x: Tensor) -> Tensor:
    h = functional.relu(m.a(x))
    return m.o(h * h.shape[-1] ** -0.5)


def test_all_outputs_stay_and_low_precision_hides_nothing() -> None:
    model = Lambda(lambda m, x: (m.o(h := functional.relu(m.a(x))), {"features": h}))
    remove(model, "a", [0, 1])
    with pytest.raises(ValueError, match="nothing can be cut out"):
        shrink(model, torch.randn(2, 6))
    small = shrink(model, torch.randn(2, 6), forward=lambda m, x: m(x)[0])  # whoever wants less gets less
    assert small.a.out_features == 6
    for dtype in (torch.bfloat16, torch.float32):
        wide = Lambda(scaled_by_width).to(dtype)
        remove(wide, "a", [0])
        with pytest.raises(RuntimeError, match=r"outputs differ by .* \(allowed"):
            shrink(wide, torch.randn(2, 6, dtype=dtype))


def test_a_branch_that_is_not_taken_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def two_heads(m: Any, x: Tensor) -> Any:
        h = functional.relu(m.a(x))
        return (m.o(h), m.b(x)) if m.training else m.o(h)

    model = Lambda(two_heads)
    remove(model, "a", [0])
    with caplog.at_level(logging.WARNING):
        shrink(model, torch.randn(2, 6))
    assert "g, b.weight, b.bias did not affect the outputs" in caplog.text


def test_a_layer_whose_result_is_unused_is_shrunk_too() -> None:
    def unwanted(m: Any, x: Tensor) -> Tensor:
        h = functional.relu(m.a(x))
        h * m.g
        m.b(functional.pad(h, (0, 0)))
        return m.o(h)

    model = Lambda(unwanted)
    model.b = nn.Linear(8, 4)
    remove(model, "a", [0, 1, 2])
    remove(model, "b", [0])
    small = shrink(model, torch.randn(2, 6))
    assert small.g.shape == (5,)
    assert small.o.weight.shape == (3, 5)
    assert small.b.weight.shape == (4, 5)  # its outputs may be wanted at other times


def test_the_model_and_the_batch_are_not_touched_by_the_check() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x.mul_(2)
            return self.o(functional.relu(self.a(x)))

    model, x = Counts(), torch.randn(2, 6)
    remove(model, "a", [0])
    before = x.clone()
    small = shrink(model, x)
    assert torch.equal(x, before)
    assert model.calls == small.calls == 0


def test_buffers_that_no_state_has_are_not_cut() -> None:
    class Scaled(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
            self.register_buffer("k", torch.arange(1.0, 9.0), persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(functional.relu(self.a(x)) * self.k)

    kept, lost = Scaled(True), Scaled(False)
    x = torch.randn(2, 6)
    for model in (kept, lost):
        remove(model, "a", [1])
    small = shrink(kept, x)
    assert torch.equal(load_shrunk(Scaled(True), small.state_dict())(x), small(x))
    with pytest.raises(ValueError, match=r"1 rows of a\.weight are zero, but"):
        shrink(lost, x)


def test_a_multiplier_in_a_depthwise_convolution_is_left_alone() -> None:
    last = nn.Conv2d(8, 5, 1), nn.Conv2d(5, 2, 1)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), *last)
    assert load_shrunk(model, model.state_dict())[1].groups == 4
    remove(model, "0", [1])
    remove(model, "2", [1])
    check_shrunk(
        model, torch.randn(2, 3, 5, 5).double(), {"2.weight": (4, 8, 1, 1), "3.weight": (2, 4, 1, 1)}
    )


def test_wrapped_models_and_models_that_cannot_be_copied() -> None:
    model = Residual()
    remove(model, "first", [0])
    remove(model, "second", [0])
    x = torch.randn(2, 5)
    assert isinstance(shrink(nn.DataParallel(model), x), Residual)
    random_unstructured(model.last, "weight", 0.5)
    model(x)
    with pytest.raises(ValueError, match=r"cannot be copied .*prune\.remove"):
        shrink(model, x)
    with pytest.raises(ValueError, match="the model has no parameters"):
        shrink(nn.ReLU(), x)


def test_compiled_models() -> None:
    model = Residual()
    remove(model, "first", [0])
    remove(model, "second", [0])
    x = torch.randn(2, 5)
    compiled = torch.compile(model, backend="eager")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        with pytest.raises(ValueError, match=r"torch\.export cannot trace the model"):
            shrink(compiled, x)
    else:
        assert torch.allclose(shrink(compiled, x)(x), model(x), atol=1e-6)


def test_outputs_that_are_no_ordinary_numbers() -> None:
    def masked(m: Any, x: Tensor) -> Any:
        y = m.o(functional.relu(m.a(x)))
        return y.masked_fill(y > 0, -torch.inf), y.argmax(1)

    model = Lambda(masked)
    remove(model, "a", [0])
    assert shrink(model, torch.randn(4, 6)).a.out_features == 7
