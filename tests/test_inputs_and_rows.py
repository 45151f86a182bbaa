"""Inputs, targets and rows of weights that are easily taken for something else."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fishleg
from fishleg import AuxiliaryOptions, InverseFisher, Surgeon
from fishleg.curvature.kronecker_factors import kronecker_factors
from fishleg.curvature.layers import find_layers
from fishleg.curvature.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from fishleg.curvature.products import fisher_product
from fishleg.curvature.samples import sample_h
from fishleg.inverse.estimators import estimate
from fishleg.inverse.learned import learner
from fishleg.pruning import diagnostics as looks
from fishleg.runtime.batches import batch_size, default_forward, slice_batch

QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 4}
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def run(model: nn.Module, data: list[Any], sparsity: float | None = 0.5, **options: Any) -> nn.Module:
    return fishleg.prune(model, data, sparsity, progress=lambda line: None, **{**QUICK, **options})


class Bag(nn.Module):
    """The sum of some words' vectors; the first is padding."""

    def __init__(self, padding: float = 0.0) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 8, padding_idx=0), nn.Linear(8, 4)
        with torch.no_grad():
            self.words.weight[0] = padding

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).sum(1))


def sentences(words: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, words, (16, 10), generator=generator) for _ in range(6)]


# --- rows of embeddings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["2:4", "global"])
@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_padding_is_never_moved(pattern: str, padding: float) -> None:
    model = Bag(padding)
    sparse = run(model, sentences(), pattern=pattern)
    row, before = sparse.words.weight[0], model.words.weight[0]
    kept = row != 0
    assert torch.equal(row[kept], before[kept])
    if pattern == "global":  # a pattern may ask for zeros in every row
        assert torch.equal(row, before)
    moved = sparse.words.weight[1:]
    assert bool((moved[moved != 0] != model.words.weight[1:][moved != 0]).any())


def test_padding_is_not_moved_by_steps_along_q_either() -> None:
    model = Bag()
    q = learner(model, sentences(), samples=16, sub_batch=4).inverse
    with torch.no_grad():  # as Adam leaves it in the end
        q.unmasked("words").L.matrix.add_(0.1 * torch.randn(40, 40))
    h = {name: value[0] for name, value in sample_h(model, sentences()[0], Categorical()).items()}
    step = q.matvec(h)["words.weight"]
    assert not bool(step[0].any())
    assert bool(step[1:].any())
    tied = {**h, "words.weight": h["words.weight"] + 1}  # a gradient of another kind, as of a tied head
    assert bool(q.matvec(tied)["words.weight"][0].any())


def test_words_that_never_occur_stay_as_they_are_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Bag()
    with caplog.at_level(logging.WARNING):
        sparse = run(model, sentences(30), sparsity=[0.3, 0.5])
    row, before = sparse.words.weight[30:], model.words.weight[30:]
    assert torch.equal(row[row != 0], before[row != 0])
    told = [r.getMessage() for r in caplog.records if "never occurred" in r.getMessage()]
    assert len(told) == 1
    assert re.match(r"10 of the 40 rows of words\.weight never occurred .*\d+ % of them go now", told[0])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run(Bag(), sentences())
    assert "never occurred" not in caplog.text


def test_which_words_occurred_is_part_of_the_state_of_q() -> None:
    model = Bag()
    q = learner(model, sentences(30), samples=16, sub_batch=4).inverse
    restored = InverseFisher.from_model(model)
    assert restored.unseen("words") is None  # it has no samples to tell by
    restored.load_state_dict(q.state_dict())
    unseen = restored.unseen("words")
    assert unseen is not None
    assert unseen.tolist() == [False] * 30 + [True] * 10
    assert restored.unseen("head") is None
    old = q.state_dict()
    del old["_extra_state"]["seen"]  # as an earlier version wrote it
    restored.load_state_dict(old)
    assert restored.unseen("words") is None


def test_tied_embeddings_are_no_tables() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 4, padding_idx=-1), "head": nn.Linear(4, 5, bias=False)})
    assert [(layer.is_embedding, layer.padding) for layer in find_layers(model)] == [
        (True, (4,)),
        (False, ()),
    ]
    model["head"].weight = model["words"].weight
    assert [(layer.is_embedding, layer.padding) for layer in find_layers(model)] == [(False, (4,))]


# --- how many examples a batch has --------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, mask: Tensor, u: Tensor) -> Tensor:
        assert mask.shape == (5, 5)
        return self.net((mask @ u).mean(1))


def test_a_mask_that_comes_first_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    batch = {"mask": torch.ones(5, 5), "u": torch.randn(16, 5, 8)}
    assert batch_size(batch) == 16
    assert slice_batch(batch, 2, 6)["u"].shape == (4, 5, 8)
    with caplog.at_level(logging.WARNING):
        run(Mixed(), [batch])
    assert not caplog.text


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"ids": torch.zeros(8, 12), "mask": torch.zeros(12, 12)}, 8),
        ({"place": torch.zeros(12), "mask": torch.zeros(12, 12), "x": torch.zeros(8, 12, 3)}, 8),
        ({"weights": torch.zeros(5), "x": torch.zeros(8, 3), "z": torch.zeros(8, 2)}, 8),
        ({"x": torch.zeros(8, 3), "table": torch.zeros(100, 7)}, 8),
        ({"mask": torch.zeros(5, 5), "x": torch.zeros(8, 5), "labels": torch.zeros(8)}, 8),
        (({"mask": torch.zeros(8, 5), "x": torch.zeros(5, 3)}, torch.zeros(5)), 5),
        ({"boxes": torch.zeros(0, 4), "x": torch.zeros(8, 3)}, 8),
        ((torch.zeros(12, 4, 6), torch.zeros(4)), 12),
    ],
)
def test_the_size_of_a_batch(batch: Any, size: int) -> None:
    assert batch_size(batch) == size


CUT: dict[str, tuple[Any, Callable[[nn.Module, Any], Tensor]]] = {
    "a list of examples": (list(torch.randn(6, 20, 8)), lambda m, b: m(torch.stack(b).mean(1))),
    "time first": (torch.randn(20, 6, 8), lambda m, b: m(b.mean(0))),
}


@pytest.mark.parametrize("name", CUT)
def test_parts_that_are_no_smaller_batches_are_refused(name: str) -> None:
    batch, forward = CUT[name]
    batch = [x.double() for x in batch] if isinstance(batch, list) else batch.double()
    model, told = mlp(), r"taken for 20 examples and cut in 2, but .* \(6, 4\), \(6, 4\), .* whole, \(6, 4\)"
    with pytest.raises(ValueError, match=told):
        run(model, [batch], forward=forward)
    whole = AuxiliaryOptions(groups=1, warm_start=4)  # nothing is cut, and there is nothing to refuse
    run(model, [batch], forward=forward, auxiliary=whole, sub_batch=20)
    run(model, [batch], forward=forward, method="diagonal", sub_batch=20)
    if isinstance(batch, list):
        with pytest.raises(ValueError, match=r"tensors \(20, 8\) was taken for 20 examples and cut in 4"):
            sample_h(model, batch, Categorical(), groups=4, forward=forward)


def test_a_model_that_fails_on_parts_is_told() -> None:
    batch = {"x": X, "edges": torch.tensor([[0, 15], [3, 4]])}
    with pytest.raises(ValueError, match=r"cannot be called on examples 0 to 7 .* 16 of them.*IndexError"):
        run(mlp(), [batch], forward=lambda m, b: m(b["x"] + b["x"][b["edges"]].sum()))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, b: m(b[0] + b[1] - b[2]),
        lambda m, b: m(torch.stack(b)),  # time first in the outputs, as in speech
        lambda m, b: m(torch.stack(b, 1)).flatten(0, 1),  # tokens in a row
        lambda m, b: m(b[0])[b[0][:, 0] > 0],  # some of the examples
    ],
)
def test_three_inputs_are_cut(forward: Callable[[nn.Module, Any], Tensor]) -> None:
    run(mlp(), [[X, X, X]], forward=forward)


# --- targets that are none ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fishleg", "kfac"])
@pytest.mark.parametrize(
    ("second", "options"),
    [
        (torch.randn(16), {"likelihood": "gaussian", "forward": lambda m, b: m(b[0])[:, :1]}),
        (torch.randn(16), {"likelihood": "gaussian", "forward": lambda m, b: m(b[0])[:, 0]}),
        (torch.rand(16, 4), {}),
        (torch.rand(16, 8), {"forward": lambda m, b: m(b[0] + b[1])}),
        (torch.arange(78, 94), {"forward": lambda m, b: m(b[0] + b[1].unsqueeze(1) / 94)}),
        (torch.full((16, 8), -100), {"forward": lambda m, b: m(b[0] + b[1])}),
    ],
)
def test_the_true_fisher_needs_no_labels(
    method: str, second: Tensor, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    second = second.double() if second.is_floating_point() else second
    with caplog.at_level(logging.WARNING):
        run(mlp(), [(X, second)], method=method, **options)
    assert not caplog.text


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.full((16,), 93), "label 93 is out of range"),
        (torch.zeros(16), r"integer labels of shape \(16,\) .*soft labels have the shape of the logits"),
        (torch.full((16, 4), 2.0), r"soft labels must lie in \[0, 1\], got 2\.0"),
    ],
)
def test_labels_that_do_not_fit_are_told_once(
    targets: Tensor, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(mlp(), [(X, targets)], sparsity=[0.3, 0.5])
    told = [r.getMessage() for r in caplog.records if "do not fit the outputs" in r.getMessage()]
    assert len(told) == 1
    assert re.search(message, told[0])
    for options in ({"mode": "gradual"}, {"method": "diagonal", "empirical": True, "sub_batch": 16}):
        with pytest.raises(ValueError, match=message):
            run(mlp(), [(X, targets)], **options)


def test_f_is_the_same_whatever_does_not_fit() -> None:
    model, forward = mlp(), lambda m, b: m(b[0])
    draws = [
        sample_h(model, (X, y), Categorical(), generator=torch.Generator().manual_seed(0), forward=forward)
        for y in (torch.zeros(16, dtype=torch.long), torch.full((16,), 93), X)
    ]
    torch.testing.assert_close(draws[0], draws[1])
    torch.testing.assert_close(draws[0], draws[2])
    first = kronecker_factors(model, find_layers(model), [X], Categorical(), generator=torch.Generator())
    second = kronecker_factors(
        model, find_layers(model), [(X, X)], Categorical(), generator=torch.Generator()
    )
    torch.testing.assert_close(first, second)


def test_kfac_leaves_ignored_batches_out() -> None:
    model, ignored = mlp(), (X, torch.full((16,), -100))
    alone, among = (
        kronecker_factors(model, find_layers(model), batches, Categorical(), generator=torch.Generator())
        for batches in ([X], [ignored, X])
    )
    torch.testing.assert_close(alone, among)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_integers_of_any_size_are_labels(dtype: torch.dtype) -> None:
    f, y = torch.randn(16, 4), (torch.arange(16) % 2).to(dtype)
    categorical = Categorical()
    categorical.check(f, y)
    assert categorical.valid(f, y) is None
    torch.testing.assert_close(categorical.nll(f, y), categorical.nll(f, y.long()))
    run(mlp(), [(X, y)], mode="gradual", stages=1)


def test_soft_labels() -> None:
    f = torch.randn(6, 3, 5)
    for class_dim in (1, 2):
        categorical = Categorical(class_dim=class_dim)
        hard = torch.randint(0, f.shape[class_dim], (6, 15 // f.shape[class_dim]))
        soft = nn.functional.one_hot(hard, f.shape[class_dim]).movedim(-1, class_dim).double()
        categorical.check(f, soft)
        assert categorical.valid(f, soft) is None
        torch.testing.assert_close(categorical.nll(f, soft), categorical.nll(f, hard))
    with pytest.raises(ValueError, match=r"integer labels of shape \(4,\)"):
        Categorical().nll(torch.randn(4, 4), torch.zeros(4))


@pytest.mark.parametrize("sigma", [1.0, torch.tensor(0.5)])
def test_one_number_per_example(sigma: Any) -> None:
    gaussian, f, y = Gaussian(sigma), torch.randn(6), torch.randn(6)
    column = f.unsqueeze(1)
    gaussian.check(f, y)
    assert gaussian.units(f) == gaussian.units(column) == 6
    assert (
        gaussian.sample(f).shape == gaussian.cotangent(f).shape == gaussian.output_fisher(f, y).shape == (6,)
    )
    for outputs in (f, column):
        for targets in (y, y.unsqueeze(1)):
            gaussian.check(outputs, targets)
            torch.testing.assert_close(gaussian.nll(outputs, targets), gaussian.nll(column, y.unsqueeze(1)))
    torch.testing.assert_close(gaussian.divergence(f, y), gaussian.divergence(column, y.unsqueeze(1)))
    model, line = nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    line.load_state_dict({f"0.{name}": value for name, value in model.state_dict().items()})
    v = {"weight": torch.randn(1, 8), "bias": torch.randn(1)}
    product = fisher_product(line, X, gaussian, {f"0.{name}": value for name, value in v.items()})
    expected = fisher_product(model, X, gaussian, v)
    torch.testing.assert_close(product, {f"0.{name}": value for name, value in expected.items()})
    with pytest.raises(ValueError, match=r"even number of outputs .* got 1"):
        Gaussian(learned_sigma=True).check(f, None)


# --- classes that cannot be ---------------------------------------------------------------------------------


def without_class(m: nn.Module, batch: Tensor) -> Tensor:
    outputs: Tensor = m(batch)
    return outputs.masked_fill(torch.tensor([False, False, False, True]), -torch.inf)


def test_a_logit_of_minus_infinity_is_a_class_less() -> None:
    model, generators = mlp(), [torch.Generator().manual_seed(0) for _ in range(2)]
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    product = fisher_product(model, X, Categorical(), v, forward=without_class)
    three = fisher_product(model, X, Categorical(), v, forward=lambda m, b: m(b)[:, :3])
    torch.testing.assert_close(product, three)
    for vectorize in (False, True):
        h = sample_h(
            model, X, Categorical(), groups=2, forward=without_class, vectorize=vectorize,
            generator=generators[vectorize],
        )  # fmt: skip
        assert not bool(h["2.bias"][:, 3].any())
        assert bool(h["2.bias"][:, :3].any())
    kronecker_factors(model, find_layers(model), [X], Categorical(), forward=without_class)
    assert int(Categorical().sample(without_class(model, X)).max()) < 3
    q, _ = estimate("fishleg", model, [X], forward=without_class, **QUICK)
    assert all(bool(value.isfinite().all()) for value in q.diag().values())


@pytest.mark.parametrize(
    ("likelihood", "row"),
    [
        (Categorical(), [0.0, torch.nan, 0.0, 0.0]),
        (Categorical(), [0.0, torch.inf, 0.0, 0.0]),
        (Categorical(), [-torch.inf] * 4),
        (Bernoulli(), [0.0, -torch.inf, 0.0, 0.0]),
        (Gaussian(), [0.0, -torch.inf, 0.0, 0.0]),
    ],
)
def test_what_leaves_no_distribution_is_refused(likelihood: Likelihood, row: list[float]) -> None:
    with pytest.raises(ValueError, match="outputs are not finite"):
        sample_h(mlp(), X, likelihood, forward=lambda m, b: m(b) + torch.tensor(row))


# --- blocks of convolutions ---------------------------------------------------------------------------------


def test_blocks_are_neighbouring_channels() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 6, 2), nn.Flatten(), nn.Linear(18, 8), nn.Linear(8, 4)
    )

    def forward(m: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = m[5](m[4](m[3](m[2](m[1](m[0](batch)).flatten(2)))))
        return outputs

    surgeon = Surgeon(
        model, [torch.randn(8, 4, 4, 4) for _ in range(3)], pattern="block:4", forward=forward, **QUICK
    )
    steps = surgeon.staged([0.3, 0.6])
    assert steps[-1].sparsity == pytest.approx(0.6, abs=0.01)
    assert surgeon.reasons["4.weight"] is not None
    for name in ("0.weight", "2.weight", "5.weight"):
        zeros = (model.get_parameter(name) == 0).unflatten(1, (-1, 4)).sum(2)
        assert set(zeros.unique().tolist()) == {0, 4}, name
        assert torch.equal(zeros == 4, ~surgeon.masks[name].unflatten(1, (-1, 4)).any(2))


def test_the_score_of_a_block_is_that_of_its_channels() -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, 4))
    data = [torch.randn(8, 4, 2, 2) for _ in range(3)]
    surgeon = Surgeon(model, data, pattern="block:2", method="exact", include=["0.weight"], **QUICK)
    q = surgeon.estimate()
    masks, inverse = surgeon.select(q, 1 / 12), q.operator("0").dense().detach()
    flat = torch.cat([model[0].weight.flatten(1), model[0].bias.unsqueeze(1)], 1).flatten().detach()
    place = torch.arange(3 * 17).view(3, 17)[:, :16].view(3, 4, 2, 2)
    costs = {
        (o, c, i, j): float(flat[g] @ torch.linalg.solve(inverse[g][:, g], flat[g]))
        for o in range(3) for c in (0, 2) for i in range(2) for j in range(2)
        for g in [place[o, c : c + 2, i, j]]
    }  # fmt: skip
    cheapest = sorted(costs, key=lambda key: costs[key])[:2]
    gone = (~masks["0.weight"]).nonzero().tolist()
    assert gone == sorted([o, c + k, i, j] for o, c, i, j in cheapest for k in (0, 1))


# --- what is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "measured", "told"),
    [
        ([0.001, 0.004, 0.01], 0.165, True),
        ([0.001, 0.001], 0.021, True),
        ([0.001, 0.001], 0.019, False),  # too little to speak of
        ([0.01, 0.01, 0.02], 0.165, False),
        ([0.001], 0.165, False),  # a single step has been judged
        ([0.001, 0.004], None, False),
    ],
)
def test_stages_that_add_up(
    predicted: list[float], measured: float | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        looks.warn_about_total(0.9, predicted, measured)
    assert bool(caplog.text) is told
    if told:
        assert re.search(
            r"at sparsity 0\.900 the KL to the outputs before pruning is .* predicted", caplog.text
        )


def test_targets_of_another_name_are_told() -> None:
    batch = {"mask": torch.ones(5, 5), "u": torch.randn(16, 5, 8), "y": torch.ones(16)}
    with pytest.raises(
        ValueError, match=r"takes no argument 'y'.*called labels, label, targets or target.*forward="
    ):
        run(Mixed(), [batch])

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(x, slope=1)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="slope"):  # a fault of the model's own
        default_forward(Wrong(), {"x": X})
