"""Models, batches and habits that are out of the ordinary, and must work or be told."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fishleg
from fishleg import Auxiliary, AuxiliaryOptions, FineTuningOptions, FishLeg, Gradual, InverseFisher, Surgeon
from fishleg.curvature.likelihoods import Categorical
from fishleg.curvature.samples import sample_h
from fishleg.formats.packed import pack, unpack
from fishleg.inverse.estimators import estimate
from fishleg.inverse.learned import learner
from fishleg.pruning import pruner
from fishleg.pruning.keep_zeros import keep_zeros
from fishleg.pruning.masks import masks_of
from fishleg.runs.budgets import count_macs
from fishleg.runtime.batches import targets_of
from fishleg.runtime.batchnorm import refresh_batchnorm
from fishleg.runtime.modes import evaluation_mode

QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 4}


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), activation(), nn.Linear(10, 4))


def inputs(count: int = 4, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, size, 6, generator=generator))


def labelled() -> list[tuple[Tensor, Tensor]]:
    return [(x, x[:, :4].argmax(1)) for x in inputs()]


# --- rows that are gone -------------------------------------------------------------------------------------


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 4),
    )  # fmt: skip
    for i in (1, 4):
        nn.init.constant_(model[i].bias, 0.5)  # a ReLU that is open for channels without input
    return model


@pytest.mark.parametrize("method", ["fishleg", "diagonal", "obert", "mfac", "kfac", "ekfac", "exact"])
def test_a_removed_row_behind_batchnorm_has_no_curvature(method: str) -> None:
    """Of a channel that is always zero BatchNorm makes 1/√ε, some 300, times its gradient."""
    surgeon = Surgeon(normed(), inputs(), pattern="rows", method=method, gamma=1e-3, **QUICK)
    surgeon.prune(0.25)
    gone = ~surgeon.masks["3.weight"].any(1)
    assert gone.any()
    q = surgeon.estimate()
    largest = 1 / 1e-3
    removed = q.diag()["3.weight"].detach()[gone]
    assert float(removed.min()) > 0.05 * largest
    assert surgeon.prune(0.5).predicted < 10  # thousands, with that curvature


def test_masks_of_rows_have_their_biases() -> None:
    model = mlp(nn.GELU)
    Surgeon(model, inputs(), pattern="rows", **QUICK).prune(0.5)
    masks = masks_of(model)
    gone = ~masks["0.weight"].any(1)
    assert torch.equal(masks["0.bias"], ~gone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep_zeros(optimizer, model)
    for x, y in labelled():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model[0].bias == 0, gone)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(20, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


def test_a_tied_head_is_the_output_layer() -> None:
    tokens = [torch.randint(0, 20, (4, 5))]
    surgeon = Surgeon(TiedHead(), tokens, pattern="rows", method="magnitude")
    assert surgeon.prunable == ["body.weight"]


# --- compiled, recurrent, half, sparse ----------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs torch 2.6")
def test_hooks_see_into_compiled_models() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(6, 4), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(x))
            return logits

    model = torch.compile(HeadFirst(), backend="eager")
    model(inputs()[0])
    surgeon = Surgeon(model, inputs(), pattern="rows", method="kfac", **QUICK)
    assert surgeon.prunable == ["_orig_mod.body.weight"]
    surgeon.prune(0.5)


def test_dropout_of_recurrent_layers_is_off() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0][:, -1]

    model, x = Recurrent().train(), torch.randn(3, 4, 6)
    with evaluation_mode(model):
        assert torch.equal(model(x), model(x))
    assert model.lstm.dropout == 0.5
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["diagonal", "obert", "mfac", "kfac", "ekfac"])
def test_rivals_compute_half_precision_models_in_float32(method: str, dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    data = [x.to(dtype) for x in inputs()]
    for pattern in ("global", "rows"):
        surgeon = Surgeon(model, data, method=method, pattern=pattern, **QUICK)
        q = surgeon.estimate()
        assert all(value.dtype == torch.float32 for value in q.diag().values())
        surgeon.prune(0.9 if pattern == "rows" else 0.5, inverse=q)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_weights_that_would_not_be_finite_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    surgeon = Surgeon(model, inputs(), method="diagonal", **QUICK)

    real = pruner.compensate

    def broken(w: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(w, *args, **kwargs)
        return type(result)(result.delta * (torch.nan if len(w) == 4 else 1), result.predicted)

    monkeypatch.setattr(pruner, "compensate", broken)
    with pytest.raises(
        ValueError, match=r"the compensation of '2\.weight' is not finite; nothing was changed"
    ):
        surgeon.prune(0.5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_sparse_gradients_of_embeddings() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.head(self.embedding(tokens).mean(1))
            return logits

    h = sample_h(Bag(), torch.randint(0, 9, (4, 5)), Categorical())
    assert not h["embedding.weight"].is_sparse
    assert bool(h["embedding.weight"].any())


# --- language models ----------------------------------------------------------------------------------------


def test_labels_that_repeat_the_tokens_are_shifted() -> None:
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    labels = torch.tensor([[1, 2, 3, -100], [4, 5, 6, 7]])
    found = targets_of({"input_ids": tokens, "labels": labels})
    assert found is not None
    assert found.tolist() == [[2, 3, -100, -100], [5, 6, 7, -100]]
    masked = torch.tensor([[-100, 9, -100, -100], [-100, -100, 8, -100]])  # of a masked language model
    assert targets_of({"input_ids": tokens, "labels": masked}) is masked
    classes = torch.tensor([0, 1])
    assert targets_of({"input_ids": tokens, "labels": classes}) is classes


def test_a_causal_model_is_trained_to_predict_the_next_token() -> None:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)

        def forward(self, input_ids: Tensor) -> Any:
            return {"logits": self.head(self.table(input_ids))}

    model = Bigram()
    tokens = (torch.arange(6) + torch.arange(8).unsqueeze(1)) % 8  # each is followed by the next larger one
    loader = [{"input_ids": tokens, "labels": tokens}]
    surgeon = Surgeon(model, loader, include=["head"], method="magnitude", compensation="none")
    with Gradual(surgeon, loader, FineTuningOptions(optimizer="adam", lr=0.05, steps=60)) as run:
        run.prune(0.3)
        losses = list(run.train())
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(model(tokens)["logits"].argmax(-1), (tokens + 1) % 8)


# --- batches ------------------------------------------------------------------------------------------------


def test_batches_of_one_example_give_as_many_gradients() -> None:
    steps: list[int] = []
    one = [x[:1] for x in inputs(3)]
    learner(mlp(), one, samples=16, sub_batch=4, callback=lambda stats: steps.append(stats.step))
    assert steps[-1] == 16


@pytest.mark.parametrize("method", ["diagonal", "kfac", "ekfac", "obert"])
def test_batches_of_ignored_labels_are_left_out(method: str) -> None:
    data = labelled()
    ignored = [(x, torch.full_like(y, -100)) for x, y in data]
    q, gamma = estimate(method, mlp(), [data[0], ignored[0], data[1]], samples=9, sub_batch=8)
    plain, _ = estimate(method, mlp(), data[:2], samples=6, sub_batch=8, gamma=gamma)
    assert q.diag().keys() == plain.diag().keys()
    with pytest.raises(ValueError, match="has a label that counts"):
        estimate(method, mlp(), ignored, samples=4, sub_batch=8)


def test_vectorized_groups_of_a_short_batch() -> None:
    model = mlp()
    options = AuxiliaryOptions(groups=4, vectorize=True)
    auxiliary = Auxiliary(model, InverseFisher.from_model(model), gamma=0.1, options=options)
    assert auxiliary.step(inputs(1, 6)[0]).step == 1


def test_batchnorm_is_as_it_was_after_a_failure() -> None:
    model = normed().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="shapes"):
        refresh_batchnorm(model, [*inputs(1), torch.randn(3, 5)], 3)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# --- devices ------------------------------------------------------------------------------------------------


def elsewhere(value: Any) -> Any:
    """Every tensor of a state on another device than the model's."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: elsewhere(item) for key, item in value.items()}
    return [elsewhere(item) for item in value] if isinstance(value, list) else value


def test_loaded_states_move_to_the_model() -> None:
    model = mlp()
    optimizer = FishLeg(model, auxiliary=AuxiliaryOptions(warm_start=6))
    x, y = labelled()[0]
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.set_masks({"0.weight": torch.rand(10, 6) > 0.5})
    learning = optimizer.auxiliary
    state = learning.state_dict()
    parts = {"terms": elsewhere(state["terms"]), "warm": elsewhere(state["warm"])}
    # values on the device "meta" cannot come back; that they are asked to is what is seen here
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        learning.load_state_dict({**state, "terms": parts["terms"]})
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        learning.load_state_dict({**state, "warm": parts["warm"]})
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        optimizer.inverse.set_extra_state(elsewhere(optimizer.inverse.get_extra_state()))


# --- habits -------------------------------------------------------------------------------------------------


def test_a_given_inverse_is_no_reason_not_to_train() -> None:
    surgeon = Surgeon(mlp(), labelled(), **QUICK)
    q = surgeon.estimate()
    with Gradual(surgeon, labelled(), FineTuningOptions(steps=3)) as run:
        run.prune(0.5, inverse=q)
        assert len(list(run.train())) == 3


def test_the_optimizer_of_another_model_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = fishleg.prune(model, inputs(), 0.5, progress=lambda line: None, **QUICK)
    with pytest.raises(ValueError, match="it is that of another model"):
        fishleg.keep_zeros(optimizer, sparse)
    with pytest.raises(ValueError, match="it is that of another model"):
        fishleg.attach(Surgeon(sparse, inputs()), optimizer, [0.9], every=2)


@pytest.mark.parametrize(("saved", "loaded"), [("1:2", "global"), ("2:5", "1:5"), ("layer", "global")])
def test_the_state_of_another_pattern_is_refused(saved: str, loaded: str) -> None:
    surgeon = Surgeon(mlp(), inputs(), pattern=saved, **QUICK)
    surgeon.prune(0.4)
    state = surgeon.state_dict()
    Surgeon(mlp(), inputs(), pattern=saved, **QUICK).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the state is that of pattern .*, this is "):
        Surgeon(mlp(), inputs(), pattern=loaded, **QUICK).load_state_dict(state)


def test_probabilities_instead_of_logits_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fishleg"):
        Surgeon(nn.Sequential(mlp(), nn.Softmax(-1)), inputs(), **QUICK).prune(0.3)
        assert "look like probabilities" in caplog.text
        caplog.clear()
        Surgeon(mlp(), inputs(), **QUICK).prune(0.3)
        assert "look like probabilities" not in caplog.text


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (TensorDataset(torch.randn(8, 6)), {}, "TensorDataset, which yields single examples"),
        (torch.randn(8, 6), {}, "Tensor, which yields single examples"),
        ([torch.randn(8, 6)], {"exclude": ["["]}, "exclude: '[' is no regular expression"),
    ],
)
def test_wrong_arguments(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Surgeon(mlp(), loader, **options)


def test_a_state_dict_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got OrderedDict"):
        Surgeon(mlp().state_dict(), inputs())  # type: ignore[arg-type]


def test_a_label_out_of_range_is_named_while_training() -> None:
    loader = [(x, torch.full((8,), 6)) for x in inputs()]
    surgeon = Surgeon(mlp(), inputs(), method="magnitude", compensation="none")
    with Gradual(surgeon, loader, FineTuningOptions(optimizer="sgd", steps=2)) as run:
        run.prune(0.5)
        with pytest.raises(ValueError, match="6"):
            list(run.train())


def test_multiply_adds_of_attention() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = count_macs(layer, torch.randn(3, 5, 8), lambda model, x: model(x))
    assert found == {
        "self_attn.in_proj_weight": 5 * 3 * 8 * 8,
        "self_attn.out_proj.weight": 5 * 8 * 8,
        "linear1.weight": 5 * 8 * 16,
        "linear2.weight": 5 * 8 * 16,
    }


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {"a": torch.tensor([0.0, 1.0, 0.0, 0.0]), "b": torch.tensor([1])}
    save_file(pack(state), tmp_path / "packed.safetensors")
    for path in (tmp_path / "packed.safetensors", str(tmp_path / "packed.safetensors")):
        found = unpack(path)
        assert all(torch.equal(found[name], value) for name, value in state.items())
