"""Q of the network that BatchNorm's renewal leaves: a filter's length, which that undoes, costs nothing."""

from typing import Any

import pytest
import torch
from oracles import categorical_fisher
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Categorical
from fishleg.curvature.samples import sample_h
from fishleg.inverse.estimators import estimate
from fishleg.inverse.options import AuxiliaryOptions
from fishleg.pruning.gradual import Gradual
from fishleg.pruning.options import PruningOptions
from fishleg.pruning.surgeon import Surgeon
from fishleg.pruning.tuning import FineTuningOptions
from fishleg.runtime.batchnorm import batch_statistics_mode, refreshable_norms

FULL = {"structure": "full", "samples": 256, "auxiliary": AuxiliaryOptions(estimator="natural", groups=4)}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4, eps=1e-9), nn.Tanh(), nn.Linear(4, 3)
    model = nn.Sequential(*layers).double()
    x = torch.randn(256, 5, dtype=torch.float64)
    model.train()(2 * x + 1)  # running statistics that are not those of any batch
    return model.eval()


def batches(size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 5, dtype=torch.float64, generator=generator) for _ in range(4)]


def along_filters(h: Tensor, model: nn.Sequential) -> float:
    """How much of the vectors h [groups, 4, 5] lies along the filters themselves."""
    w = model[0].weight.detach()
    return float((h * w).sum(-1).abs().max() / h.norm(dim=-1).max() / w.norm(dim=-1).min())


def test_vectors_by_the_batch_have_the_covariance_of_the_coupled_outputs() -> None:
    model, x = network(), batches(6)[0]
    model[1].train()
    statistics = {name: value.clone() for name, value in model[1].named_buffers()}
    generator, name = torch.Generator().manual_seed(0), "0.weight"
    draws = [
        sample_h(
            model, x, Categorical(), names=[name], generator=generator, batch_statistics=True
        )[name][0].flatten()
        for _ in range(3000)
    ]  # fmt: skip
    assert all(torch.equal(value, statistics[key]) for key, value in model[1].named_buffers())
    covariance = torch.stack(draws).mT @ torch.stack(draws) / len(draws)

    def outputs(w: Tensor) -> Tensor:
        y = x @ w.mT
        y = (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-9).sqrt()
        return torch.tanh(y * model[1].weight + model[1].bias) @ model[3].weight.mT + model[3].bias

    w = model[0].weight.detach()
    J = torch.func.jacrev(outputs)(w).flatten(2)  # [6, 3, 20]: every example moves every output
    F = sum(
        j.detach().mT @ categorical_fisher(f) @ j.detach()
        for j, f in zip(J, outputs(w).detach(), strict=True)
    ) / len(x)
    assert float((covariance - F).norm() / F.norm()) < 0.1
    assert along_filters(torch.stack(draws).view(-1, 4, 5), model) < 1e-6


@pytest.mark.parametrize("by_batch", [None, True, False])
def test_a_learned_q_charges_for_the_length_of_a_filter_only_with_running_statistics(
    by_batch: bool | None,
) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    damped = {"relative_damping": 0.1, **FULL}  # enough of it to tell what is left of the curvature
    surgeon = Surgeon(model, batches(), batch_statistics=by_batch, include=["0.weight"], **damped)
    for look in (surgeon.estimate, lambda: surgeon.refine(4)):
        q, w = look(), model[0].weight.detach()
        alone = torch.diag_embed(torch.ones(4, dtype=w.dtype)).unsqueeze(-1) * w  # one filter each
        curvature = float((alone * q.operator("0").solve(alone)).detach().sum())
        damping = surgeon.gamma * float(w.square().sum())
        assert (curvature > 2 * damping) == (by_batch is False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


RIVALS = [(method, False) for method in ("diagonal", "obert", "mfac", "kfac", "ekfac")]


@pytest.mark.parametrize(("method", "empirical"), [*RIVALS, ("diagonal", True), ("obert", True)])
def test_rivals_do_so_on_request(method: str, empirical: bool) -> None:
    labels = torch.arange(64) % 3
    found = {}
    for by_batch in (None, False, True):
        model = network()
        data = [(x, labels) for x in batches()]
        options = {"method": method, "empirical": empirical, "samples": 16, "gamma": 1e-3}
        q = Surgeon(model, data, batch_statistics=by_batch, **options).estimate()
        found[by_batch] = q.operator("0").diag()
        assert not any(module.training for module in model.modules())
    torch.testing.assert_close(found[None], found[False])
    assert not torch.allclose(found[True], found[False], rtol=0.05)


def test_frozen_norms_keep_their_statistics() -> None:
    model = network()
    assert refreshable_norms(model) == [model[1]]
    with batch_statistics_mode(model):
        assert model[1].training
        assert not model.training
    assert not model[1].training
    model.train()
    model[1].eval()  # frozen on purpose, within a model that is being trained
    assert refreshable_norms(model) == []
    model.eval()
    model[1].weight.requires_grad_(False)
    assert refreshable_norms(model) == []


@pytest.mark.parametrize("method", ["fishleg", "obert", "ekfac"])
def test_batches_of_one_example_have_no_statistics(method: str) -> None:
    """BatchNorm cannot normalise one example by itself: Q is then that of the running statistics."""
    options = {"include": ["0.weight"], "method": method, "batch_statistics": True, **FULL, "samples": 16}
    q = Surgeon(network(), batches(1), **options).estimate()
    assert bool(q.operator("0").diag().isfinite().all())


def test_groups_are_never_single_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(*_: object, groups: int, **__: object) -> dict[str, Tensor]:
        asked.append(groups)
        raise KeyboardInterrupt

    monkeypatch.setattr("fishleg.inverse.auxiliary.sample_h", spy)
    surgeon = Surgeon(network(), batches(6), include=["0.weight"], **FULL)
    with pytest.raises(KeyboardInterrupt):
        surgeon.estimate()
    assert asked == [3]


def test_errors() -> None:
    for wrong in ({"batchnorm_batches": 0}, {"method": "exact"}):
        with pytest.raises(ValueError, match=r"batch_statistics=True needs batchnorm_batches >= 1"):
            PruningOptions(batch_statistics=True, **wrong)
    with pytest.raises(ValueError, match=r"exclude each other"):
        PruningOptions(batch_statistics=True, auxiliary=AuxiliaryOptions(vectorize=True))
    with pytest.raises(ValueError, match=r"a method other than exact"):
        estimate("exact", network(), batches(), batch_statistics=True)


def test_without_a_refresh_q_is_that_of_the_running_statistics() -> None:
    for batches_to_refresh in (0, 20):
        surgeon = Surgeon(network(), batches(), batchnorm_batches=batches_to_refresh, **FULL)
        assert surgeon.new_learner().options.batch_statistics == bool(batches_to_refresh)


def test_a_step_that_fails_leaves_the_statistics_alone() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    broken = [torch.full_like(x, torch.nan) for x in batches()]
    with pytest.raises(ValueError, match="not finite"):
        Surgeon(model, broken, include=["0.weight"], **FULL).estimate()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].track_running_stats


def test_norms_that_are_frozen_in_training_stay_so_for_the_first_q() -> None:
    """Gradual's first look at a model in training mode, one BatchNorm of which is in evaluation mode."""
    found = []
    for frozen in (True, False):
        model = network()
        model.train()
        model[1].training = not frozen
        data = [(x, torch.arange(64) % 3) for x in batches()]
        run = Gradual(
            Surgeon(model, data, include=["0.weight"], gamma=1e-3, **FULL), None, FineTuningOptions(steps=1)
        )
        found.append(run.look().operator("0").diag())
    plain = Surgeon(network(), data, include=["0.weight"], gamma=1e-3, batch_statistics=False, **FULL)
    torch.testing.assert_close(found[0], plain.estimate().operator("0").diag())
    assert not torch.allclose(found[0], found[1], rtol=0.05)


def test_without_batchnorm_every_example_may_be_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(*_: object, groups: int, **__: object) -> dict[str, Tensor]:
        asked.append(groups)
        raise KeyboardInterrupt

    monkeypatch.setattr("fishleg.inverse.auxiliary.sample_h", spy)
    surgeon = Surgeon(nn.Sequential(nn.Linear(5, 3)).double(), batches(4), **FULL)
    with pytest.raises(KeyboardInterrupt):
        surgeon.estimate()
    assert asked == [4]


@pytest.mark.parametrize(
    ("options", "refreshes"),
    [
        ({}, 1),  # Q is refined by the batch: only the finished model's statistics are ever read
        ({"batch_statistics": False}, 3),
        ({"auxiliary": AuxiliaryOptions(estimator="probe")}, 3),  # its products read the running ones
        ({"auxiliary": AuxiliaryOptions(vectorize=True)}, 3),
    ],
)
def test_statistics_are_renewed_between_cuts_only_where_they_are_read(
    options: dict[str, Any], refreshes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("fishleg.pruning.surgeon.refresh_batchnorm", lambda *given: seen.append(given))
    Surgeon(network(), batches(), samples=8, sub_batch=16, measure_batches=0, **options).prune(
        0.6, cuts=3, refine=1
    )
    assert len(seen) == refreshes
