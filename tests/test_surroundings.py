"""What the caller has around a pruning, and parts of a model that pruning must leave alone."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torch_prune

import fishleg
from fishleg.curvature.likelihoods import Categorical
from fishleg.pruning.gradual import gradual
from fishleg.pruning.masks import masks_of
from fishleg.pruning.surgeon import Surgeon
from fishleg.pruning.tuning import FineTuningOptions
from fishleg.runtime.batches import slice_batch
from fishleg.runtime.batchnorm import refresh_batchnorm
from fishleg.runtime.modes import gradients_enabled

QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 4}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def inputs(count: int = 4, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, size, 6, generator=generator))


def labelled() -> list[tuple[Tensor, Tensor]]:
    return [(x, x[:, :4].argmax(1)) for x in inputs()]


def quiet(_: str) -> None:
    pass


# --- contexts -----------------------------------------------------------------------------------------------

CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("mode", ["staged", "gradual"])
def test_the_callers_context_changes_nothing(context: str, mode: str) -> None:
    options: dict[str, Any] = {"mode": mode, "progress": quiet, **QUICK}
    if mode == "gradual":
        options |= {"stages": 1, "tuning": FineTuningOptions(steps=3, refine=1)}
    plain = fishleg.prune(mlp(), labelled(), 0.5, **options)
    with CONTEXTS[context]():
        inside = fishleg.prune(mlp(), labelled(), 0.5, **options)
    for a, b in zip(plain.parameters(), inside.parameters(), strict=True):
        assert torch.equal(a, b)


def test_autocast_goes_on_with_the_new_weights() -> None:
    model, x = mlp(), inputs()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)  # which keeps copies of the weights in low precision
        with gradients_enabled(), torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert not model(x).any()


def test_inference_mode_is_refused_before_anything_is_done() -> None:
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.inference_mode\(\) rules out"):
        Surgeon(model, inputs(), **QUICK).prune(0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# --- BatchNorms ---------------------------------------------------------------------------------------------


class HeadForTraining(nn.Module):
    """A second head with a BatchNorm of its own, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.head, self.other_norm, self.other = nn.Linear(8, 4), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.body(x)).relu()
        return self.head(z) + self.other(self.other_norm(z)) if self.training else self.head(z)


def test_a_norm_that_the_evaluated_model_does_not_use_keeps_its_statistics() -> None:
    model = HeadForTraining()
    for x in inputs():
        model(x)
    model.eval()
    kept = {name: value.clone() for name, value in model.other_norm.named_buffers()}
    used = model.norm.running_mean.clone()
    assert refresh_batchnorm(model, inputs(), 3) == 1
    assert all(torch.equal(value, kept[name]) for name, value in model.other_norm.named_buffers())
    assert not torch.equal(model.norm.running_mean, used)


@pytest.mark.parametrize("optimizer", ["sgd", "fishleg"])
def test_a_frozen_body_given_in_evaluation_mode_keeps_its_statistics_in_training(optimizer: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8),
                          nn.ReLU(), nn.Linear(8, 4))  # fmt: skip
    model[:2].requires_grad_(False)
    model.eval()
    frozen, moving = ({n: b.clone() for n, b in model[i].named_buffers()} for i in (1, 4))
    tuning = FineTuningOptions(optimizer=optimizer, steps=4, refine=1)
    gradual(Surgeon(model, labelled(), batchnorm_batches=0, **QUICK), [0.5], tuning=tuning)
    assert all(torch.equal(value, frozen[name]) for name, value in model[1].named_buffers())
    assert not torch.equal(model[4].running_mean, moving["running_mean"])
    assert not model[1].training


def test_a_last_batch_of_one_example_is_left_out_of_the_training() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    data = [*labelled()[:2], (torch.randn(1, 6), torch.tensor([0]))]
    done: list[float] = []
    gradual(
        Surgeon(model, labelled(), **QUICK), [0.5], data, FineTuningOptions(optimizer="sgd", steps=5),
        on_step=lambda progress: done.append(progress.loss),
    )  # fmt: skip
    assert len(done) == 5


def test_running_statistics_that_are_asked_for_hold_while_training() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    surgeon = Surgeon(model, labelled(), batch_statistics=False, **QUICK)
    gradual(surgeon, [0.5], tuning=FineTuningOptions(steps=2))
    assert not surgeon.learning.options.batch_statistics


# --- precision ----------------------------------------------------------------------------------------------


def test_a_kl_is_measured_in_single_precision_at_least() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 500)).bfloat16()
    data = [x.bfloat16() for x in inputs(2, 64)]
    surgeon = Surgeon(model, data, method="diagonal", **QUICK)
    with torch.no_grad():
        before = [model(x).float() for x in data]
        step = surgeon.prune(0.1)
        after = [model(x).float() for x in data]
    found = [float(Categorical().divergence(f, g)) for f, g in zip(after, before, strict=True)]
    assert step.measured == pytest.approx(sum(found) / 2, rel=1e-4)


# --- which weights ------------------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    """The outputs that count are not those of the layer that is called last."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.decoder = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x).relu()
        y = self.head(z)
        return y, self.decoder(z)


class Residual(nn.Module):
    """Both layers write into what becomes the output: the last one is taken for the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).tanh()
        return x + self.last(x).tanh()


@pytest.mark.parametrize(
    ("model", "kept"),
    [(TwoOutputs, "head"), (Residual, "last"), (lambda: nn.Sequential(mlp(), nn.LogSoftmax(-1)), "0.2")],
)
def test_rows_of_the_layer_that_makes_the_outputs_stay(model: Callable[[], nn.Module], kept: str) -> None:
    surgeon = Surgeon(model(), inputs(), pattern="rows", **QUICK)
    protected = [name for name, why in surgeon.reasons.items() if why and "output layer" in why]
    assert protected == [f"{kept}.weight"]


def test_all_frozen_but_one_the_last_called_is_the_output_layer() -> None:
    model = TwoOutputs()
    model.requires_grad_(False)
    model.decoder.requires_grad_(True)
    surgeon = Surgeon(model, inputs(), pattern="rows", include=["decoder"], **QUICK)
    assert surgeon.prunable == ["decoder.weight"]


def test_a_tied_weight_is_known_by_all_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(x)).tanh())

    data = [torch.randint(0, 10, (8, 3)) for _ in range(2)]
    assert Surgeon(Tied(), data, exclude=["^head"]).prunable == ["body.weight"]
    assert Surgeon(Tied(), data, exclude=["^embedding"]).prunable == ["body.weight"]
    assert Surgeon(Tied(), data, include=[r"head\.weight"]).prunable == ["embedding.weight"]


def test_a_parametrized_weight_is_told_apart_and_its_state_stays() -> None:
    model = mlp()
    parametrizations.spectral_norm(model[0])
    state = {name: value.clone() for name, value in model.named_buffers()}
    surgeon = Surgeon(model, inputs(), measure_batches=0, **QUICK)
    assert "parametrized: make it an ordinary weight" in surgeon.table()
    assert all(torch.equal(value, state[name]) for name, value in model.named_buffers())


def test_a_lazy_layer_must_know_its_shape() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: call the model once"):
        Surgeon(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), inputs())


def test_a_tensor_that_starts_at_zero_is_no_mask(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    nn.init.zeros_(model[2].weight)  # as adapters start
    with torch.no_grad():
        model[0].weight[0, 0] = 0
    with caplog.at_level(logging.INFO, "fishleg"):
        assert list(masks_of(model)) == ["0.weight"]
    assert "2.weight is all zeros: taken for a start" in caplog.text


# --- batches ------------------------------------------------------------------------------------------------


def test_texts_are_cut_with_the_rest() -> None:
    batch = {"x": torch.arange(4), "text": ["a", "b", "c", "d"], "about": ["two", "words"], "pair": (1, 2)}
    cut = slice_batch(batch, 1, 3)
    assert cut["x"].tolist() == [1, 2]
    assert cut["text"] == ["b", "c"]
    assert (cut["about"], cut["pair"]) == (["two", "words"], (1, 2))


def test_inputs_with_time_first_are_refused() -> None:
    batch = torch.randn(12, 4, 6), torch.randint(0, 4, (4,))
    with pytest.raises(ValueError, match=r"length 12 and its targets 4: .*batch_first=True"):
        slice_batch(batch, 0, 4)
    assert slice_batch(batch, 0, 12)[0].shape == (12, 4, 6)  # nothing is cut


# --- states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 2, 1])
def test_a_surgeon_goes_on_bit_for_bit_in_stages(size: int) -> None:
    def end(stopped: bool) -> list[Tensor]:
        model, data = mlp(), inputs(16 // size, size)
        surgeon = Surgeon(model, data, measure_batches=0, samples=32, sub_batch=4)
        surgeon.staged([0.3])
        if stopped:
            state, weights = surgeon.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            surgeon.staged([0.4])  # what goes on in the old one does not touch the state
            model = mlp()
            model.load_state_dict(weights)
            surgeon = Surgeon(model, data, measure_batches=0, samples=32, sub_batch=4)
            surgeon.load_state_dict(state)
        surgeon.staged([0.5, 0.6])
        return list(model.parameters())

    for a, b in zip(end(False), end(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: fishleg.PruningOptions(exchanges=12.0), "exchanges must be >= 0 and whole, got 12.0"),
        (lambda: fishleg.PruningOptions(samples=64.5), "samples must be >= 1 and whole, got 64.5"),
        (lambda: FineTuningOptions(steps=2.0), "steps must be >= 1 and whole, got 2.0"),
        (lambda: FineTuningOptions(cuts=True), "cuts must be >= 1 and whole, got True"),
        (lambda: fishleg.PruningOptions(method="kfac", empirical=True), "empirical=True needs one of"),
    ],
)
def test_numbers_that_must_be_whole(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_magnitude_predicts_no_loss() -> None:
    lines: list[str] = []
    fishleg.prune(mlp(), inputs(), 0.5, mode="one-shot", method="magnitude", progress=lines.append, **QUICK)
    assert "KL of this step measured" in lines[0]
    assert "predicted" not in lines[0]


def test_a_model_that_cannot_be_copied_says_why() -> None:
    model = mlp()
    torch_prune.random_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"cannot be copied .*prune\.remove.*inplace=True"):
        fishleg.prune(model, inputs(), 0.5, progress=quiet)


def test_options_that_are_none_are_the_usual_ones() -> None:
    sparse = fishleg.prune(mlp(), inputs(), 0.5, options=None, progress=quiet)
    assert int(sum((p == 0).sum() for p in sparse.parameters())) == 50
