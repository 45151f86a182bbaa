"""Q of a network with BatchNorm that normalises by the batch: the length of a filter costs nothing."""

from typing import Any

import pytest
import torch
from helpers import batches_of_5, net_with_batchnorm
from torch import Tensor, nn

from fishleg import AuxiliaryOptions, FineTuningOptions, PruningOptions, PruningSession, Surgeon
from fishleg.pruning import InverseUpdated

FULL = {"structure": "full", "samples": 256, "auxiliary": AuxiliaryOptions(estimator="natural", groups=4)}


@pytest.mark.parametrize("by_batch", [None, True, False])
def test_a_learned_q_charges_for_the_length_of_a_filter_only_with_running_statistics(
    by_batch: bool | None,
) -> None:
    model = net_with_batchnorm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    damped = {"relative_damping": 0.1, **FULL}  # enough of it to tell what is left of the curvature
    surgeon = Surgeon(
        model,
        batches_of_5(),
        options=PruningOptions(**damped, batch_statistics=by_batch, include=["0.weight"]),
    )
    for update in (surgeon.curvature.estimate, lambda: surgeon.curvature.refine(4)):
        q, w = update(), model[0].weight.detach()
        alone = torch.diag_embed(torch.ones(4, dtype=w.dtype)).unsqueeze(-1) * w  # one filter each
        curvature = float((alone * q.operator("0").solve(alone)).detach().sum())
        damping = surgeon.curvature.gamma * float(w.square().sum())
        assert (curvature > 2 * damping) == (by_batch is False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


RIVALS = [(method, False) for method in ("diagonal", "obert", "mfac", "kfac", "ekfac")]


@pytest.mark.parametrize(("method", "empirical"), [*RIVALS, ("diagonal", True), ("obert", True)])
def test_other_methods_use_batch_statistics_on_request(method: str, empirical: bool) -> None:
    labels = torch.arange(64) % 3
    found = {}
    for by_batch in (None, False, True):
        model = net_with_batchnorm()
        data = [(x, labels) for x in batches_of_5()]
        options = {"method": method, "empirical": empirical, "samples": 16, "gamma": 1e-3}
        q = Surgeon(
            model, data, options=PruningOptions(**options, batch_statistics=by_batch)
        ).curvature.estimate()
        found[by_batch] = q.operator("0").diag()
        assert not any(module.training for module in model.modules())
    torch.testing.assert_close(found[None], found[False])
    assert not torch.allclose(found[True], found[False], rtol=0.05)


@pytest.mark.parametrize("method", ["fishleg", "obert", "ekfac"])
def test_batches_of_one_example_have_no_statistics(method: str) -> None:
    """BatchNorm cannot normalise one example by itself: Q is then that of the running statistics."""
    options = {"include": ["0.weight"], "method": method, "batch_statistics": True, **FULL, "samples": 16}
    q = Surgeon(net_with_batchnorm(), batches_of_5(1), options=PruningOptions(**options)).curvature.estimate()
    assert bool(q.operator("0").diag().isfinite().all())


def test_groups_are_never_single_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(*_: object, groups: int, **__: object) -> dict[str, Tensor]:
        asked.append(groups)
        raise KeyboardInterrupt

    monkeypatch.setattr("fishleg.inverse.auxiliary.sample_h", spy)
    surgeon = Surgeon(
        net_with_batchnorm(), batches_of_5(6), options=PruningOptions(**FULL, include=["0.weight"])
    )
    with pytest.raises(KeyboardInterrupt):
        surgeon.curvature.estimate(surgeon.masks)
    assert asked == [3]


def test_without_a_refresh_q_is_that_of_the_running_statistics() -> None:
    for batches_to_refresh in (0, 20):
        surgeon = Surgeon(
            net_with_batchnorm(),
            batches_of_5(),
            options=PruningOptions(**FULL, batchnorm_batches=batches_to_refresh),
        )
        assert surgeon.curvature.new_learning().options.batch_statistics == bool(batches_to_refresh)


def test_a_step_that_fails_leaves_the_statistics_alone() -> None:
    model = net_with_batchnorm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    broken = [torch.full_like(x, torch.nan) for x in batches_of_5()]
    with pytest.raises(ValueError, match="not finite"):
        Surgeon(model, broken, options=PruningOptions(**FULL, include=["0.weight"])).curvature.estimate()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].track_running_stats


@pytest.mark.slow
def test_norms_that_are_frozen_in_training_stay_so_for_the_first_q() -> None:
    """The first Q of a gradual run, where one BatchNorm of a model in training mode is in evaluation mode."""
    found = []
    for frozen in (True, False):
        model = net_with_batchnorm()
        model.train()
        model[1].training = not frozen
        data = [(x, torch.arange(64) % 3) for x in batches_of_5()]
        options = PruningOptions(**FULL, include=["0.weight"], gamma=1e-3)
        session = PruningSession(model, data, options=options, fine_tuning=FineTuningOptions(steps=1))
        next(event for event in session.stage(0.5) if isinstance(event, InverseUpdated))
        assert session.surgeon.curvature.inverse is not None
        found.append(session.surgeon.curvature.inverse.operator("0").diag())
    plain = Surgeon(
        net_with_batchnorm(),
        data,
        options=PruningOptions(**FULL, include=["0.weight"], gamma=1e-3, batch_statistics=False),
    )
    torch.testing.assert_close(found[0], plain.curvature.estimate().operator("0").diag())
    assert not torch.allclose(found[0], found[1], rtol=0.05)


def test_without_batchnorm_every_example_may_be_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(*_: object, groups: int, **__: object) -> dict[str, Tensor]:
        asked.append(groups)
        raise KeyboardInterrupt

    monkeypatch.setattr("fishleg.inverse.auxiliary.sample_h", spy)
    surgeon = Surgeon(
        nn.Sequential(nn.Linear(5, 3)).double(), batches_of_5(4), options=PruningOptions(**FULL)
    )
    with pytest.raises(KeyboardInterrupt):
        surgeon.curvature.estimate(surgeon.masks)
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
def test_statistics_are_renewed_between_cuts_only_if_they_are_read(
    options: dict[str, Any], refreshes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("fishleg.pruning.affected_norms.refresh_batchnorm", lambda *given: seen.append(given))
    chosen = PruningOptions(**options, samples=8, sub_batch=16, measure_batches=0, cuts=3, refine_steps=1)
    Surgeon(net_with_batchnorm(), batches_of_5(), options=chosen).prune(0.6)
    assert len(seen) == refreshes
