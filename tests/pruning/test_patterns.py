"""Patterns remove exactly what they were asked for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import inputs_8, net_8_16_4, prune_with, zeros_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fishleg import register_pattern
from fishleg.options.names import PATTERNS
from fishleg.pruning.patterns import NM, Blocks, Pattern, Rows, Unstructured, as_pattern

SHAPES = {"linear": (6, 8), "conv": (4, 8, 3, 3), "point": (5, 16, 1, 1)}


sparsities = st.floats(0.0, 0.9)


seeds = st.integers(0, 2**31)


def draw(seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def removed(masks: dict[str, Tensor]) -> int:
    return sum(int((~mask).sum()) for mask in masks.values())


def size(scores: dict[str, Tensor]) -> int:
    return sum(s.numel() for s in scores.values())


def groups(mask: Tensor, m: int) -> Tensor:
    """Runs of m consecutive input channels at one output and kernel position, from the definition."""
    weight = mask.flatten(2) if mask.dim() > 2 else mask.unsqueeze(-1)
    n_out, n_in, kernel = weight.shape
    return torch.stack(
        [weight[o, i : i + m, k] for o in range(n_out) for k in range(kernel) for i in range(0, n_in, m)]
    )


@given(sparsities, seeds)
def test_global_removes_exactly_the_lowest(sparsity: float, seed: int) -> None:
    scores = draw(seed)
    masks = Unstructured().select(scores, sparsity)
    assert removed(masks) == round(sparsity * size(scores))
    assert {name: mask.shape for name, mask in masks.items()} == {n: s.shape for n, s in scores.items()}
    gone = torch.cat([s[~masks[name]] for name, s in scores.items()])
    kept = torch.cat([s[masks[name]] for name, s in scores.items()])
    assert gone.numel() == 0 or gone.max() <= kept.min()


@given(sparsities, seeds)
def test_per_layer_removes_exactly_the_lowest_of_each(sparsity: float, seed: int) -> None:
    scores = draw(seed)
    for name, mask in Unstructured(per_layer=True).select(scores, sparsity).items():
        count = round(sparsity * mask.numel())
        expected = scores[name].flatten().sort().values[:count]
        torch.testing.assert_close(scores[name][~mask].sort().values, expected)


@pytest.mark.parametrize("pattern", [Blocks(4), Rows()])
@given(sparsities, seeds)
def test_groups_are_counted_as_groups(pattern: Pattern, sparsity: float, seed: int) -> None:
    scores = draw(seed, {"a": (30,), "b": (12,)})
    masks = pattern.select(scores, sparsity)
    assert removed(masks) == round(sparsity * 42)
    gone = torch.cat([s[~masks[name]] for name, s in scores.items()])
    may_go = torch.cat([s.sort().values[:-1] for s in scores.values()])  # the best of each tensor stays
    assert torch.equal(gone.sort().values, may_go.sort().values[: len(gone)])


def test_equal_scores_are_still_counted_exactly() -> None:
    assert removed(Unstructured().select({"w": torch.ones(10, 10)}, 0.37)) == 37


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.33])
def test_floor_never_empties_a_tensor(floor: float) -> None:
    scores = {"low": torch.rand(4, 5), "high": 10 + torch.rand(20, 20)}
    masks = Unstructured().select(scores, 0.5, floor)
    assert removed(masks) == 210
    assert int(masks["low"].sum()) == max(1, math.ceil(floor * 20))
    best = scores["low"].flatten().topk(int(masks["low"].sum())).values
    assert torch.equal(scores["low"][masks["low"]].sort().values, best.sort().values)


@given(seeds, st.floats(0.05, 0.5), st.floats(0.55, 0.9))
def test_what_is_removed_stays_removed(seed: int, first: float, second: float) -> None:
    old = Unstructured().select(draw(seed), first)
    again = {name: s.masked_fill(~old[name], -torch.inf) for name, s in draw(seed + 1).items()}
    new = Unstructured().select(again, second)
    assert removed(new) == round(second * size(again))
    assert not any(bool((new[name] & ~old[name]).any()) for name in old)


def test_a_floor_above_what_is_left_does_not_revive() -> None:
    scores = {"a": torch.tensor([-math.inf] * 9 + [1.0]), "b": torch.rand(10)}
    masks = Unstructured().select(scores, 0.5, floor=0.5)
    assert not masks["a"][:9].any()
    assert removed(masks) == 10


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (1, 2)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nm_keeps_the_best_n_of_every_group(n: int, m: int, shape: tuple[int, ...]) -> None:
    scores = draw(shapes={"w": shape})["w"]
    pattern = NM(n, m)
    mask = pattern.select({"w": scores}, pattern.limit)["w"]
    kept = groups(mask, m)
    assert bool((kept.sum(1) == n).all())
    grouped = groups(scores, m)
    best = grouped.topk(n).values
    assert torch.equal(grouped[kept].view(-1, n).sort().values, best.sort().values)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
@given(st.floats(0.0, 1.0), seeds)
def test_nm_on_the_way(n: int, m: int, fraction: float, seed: int) -> None:
    """Below its limit a pattern is exact in number and leaves at least n of every group."""
    pattern, scores = NM(n, m), draw(seed)
    sparsity = fraction * pattern.limit
    masks = pattern.select(scores, sparsity)
    assert removed(masks) == round(sparsity * size(scores))
    assert all(bool((groups(mask, m).sum(1) >= n).all()) for mask in masks.values())
    marked = {name: s.masked_fill(~masks[name], -torch.inf) for name, s in draw(seed + 1).items()}
    last = pattern.select(marked, pattern.limit, 0.02)
    for name, mask in last.items():
        assert bool((groups(mask, m).sum(1) == n).all())
        assert not bool((mask & ~masks[name]).any())


@pytest.mark.parametrize(
    ("pattern", "shape", "reason"),
    [
        (NM(2, 4), (3, 6), "6 inputs are not a multiple of 4"),
        (NM(2, 4), (3, 8, 3, 3), None),
        (NM(2, 4), (3, 1, 2, 2), "1 inputs are not a multiple of 4"),
        (Blocks(4), (3, 6), "6 inputs are not a multiple of 4"),
        (Blocks(4), (3, 8, 3, 3), None),
        (Blocks(9), (3, 2, 3, 3), "2 inputs are not a multiple of 9"),
        (Rows(), (3, 7), None),
        (Unstructured(), (3, 7), None),
    ],
)
def test_unsuitable(pattern: Pattern, shape: tuple[int, ...], reason: str | None) -> None:
    assert pattern.unsuitable(shape) == reason


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("global", Unstructured()),
        ("layer", Unstructured(per_layer=True)),
        ("rows", Rows()),
        ("2:4", NM(2, 4)),
        ("16:32", NM(16, 32)),
        ("block:4", Blocks(4)),
        (NM(1, 4), NM(1, 4)),
    ],
)
def test_as_pattern(name: Pattern | str, expected: Pattern) -> None:
    assert as_pattern(name) == expected


def test_patterns_describe_themselves() -> None:
    assert [p.group_size for p in (Unstructured(), NM(2, 4), Blocks(4), Rows())] == [None, None, 4, None]
    assert [p.whole_rows for p in (Unstructured(), NM(2, 4), Blocks(4), Rows())] == [False] * 3 + [True]
    assert [p.limit for p in (Unstructured(), NM(1, 4), NM(4, 8))] == [1.0, 0.75, 0.5]


TEN = {"w": torch.arange(10.0)}


GONE = {"w": torch.tensor([-math.inf] * 6 + [1.0] * 4)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NM(4, 4), "0 < N < M, got 4:4"),
        (lambda: NM(0, 4), "0 < N < M, got 0:4"),
        (lambda: Blocks(1), "at least 2 weights, got 1"),
        (lambda: as_pattern("columns"), "one of global, layer, rows, block .*, got 'columns'"),
        (lambda: as_pattern("2:4:8"), "got '2:4:8'"),
        (lambda: as_pattern("4:2"), "got 4:2"),
        (lambda: Unstructured().select(TEN, 1.0), r"sparsity must be in \[0, 1\), got 1.0"),
        (lambda: Unstructured().select(TEN, -0.1), "got -0.1"),
        (
            lambda: Unstructured().select(TEN, 0.98),
            r"remove 10 of 10 .*allow 9 to be removed, .* most 0.9000",
        ),
        (lambda: Unstructured().select(TEN, 0.8, 0.3), "remove 8 of 10 .*allow 7 to be removed"),
        (lambda: Unstructured().select(GONE, 0.5), "remove 5 of 10 .* 6 are removed already"),
        (lambda: NM(2, 4).select({"w": torch.rand(4, 8)}, 0.75), "remove 24 of 32 .*allow 16 .* most 0.5000"),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_layer_that_cannot_lose_so_much_is_named() -> None:
    scores = {"a": torch.rand(8, 8), "b": torch.rand(2, 2)}
    with pytest.raises(ValueError, match=r"cannot remove 4 of 4 in 'b' \(sparsity 0\.9500\)"):
        as_pattern("layer").select(scores, 0.95)


@pytest.fixture
def scratch_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns that a test registers are gone after it."""
    monkeypatch.setattr(PATTERNS, "_values", {})


@pytest.mark.usefixtures("scratch_patterns")
def test_a_registered_pattern_is_known_by_its_name() -> None:
    register_pattern("run", lambda argument: Blocks(int(argument or 2)))
    assert as_pattern("run") == Blocks(2)
    assert as_pattern("run:4") == Blocks(4)
    sparse = prune_with(net_8_16_4(), inputs_8(), 0.5, method="magnitude", pattern="run:4")
    for zero in zeros_of(sparse).values():
        assert set(zero.view(-1, 4).sum(1).tolist()) <= {0, 4}
    with pytest.raises(ValueError, match=r"block, run .*, got 'walk'"):
        as_pattern("walk")


@pytest.mark.usefixtures("scratch_patterns")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("global", "must be new and not empty, got 'global'"),
        ("block", "must be new"),
        ("", "must be new and not empty, got ''"),
        ("a:b", "must not contain a colon, got 'a:b'"),
    ],
)
def test_names_that_cannot_be_registered(name: str, message: str) -> None:
    before = as_pattern("block:4")
    with pytest.raises(ValueError, match=message):
        register_pattern(name, lambda _: Unstructured())
    assert as_pattern("block:4") == before
