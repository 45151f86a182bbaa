"""Budgets: the largest sparsity within a drop of the metric, parameters, multiply-adds."""

import pytest
import torch
from small_runs import go
from torch import nn

from fishleg.runs.directory import read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.events import read_events
from fishleg.runs.macs import count_macs
from fishleg.runs.plan import Plan


@pytest.mark.slow
def test_max_drop_finds_the_largest_sparsity_that_fits(tmp_path):
    run, record = go(tmp_path, max_drop="10%", stages=5)
    assert run.plan is not None
    assert record["dense"]["metric"] - record["sparse"]["metric"] <= 0.1
    assert run.plan.bad is not None
    assert run.plan.good < run.plan.bad
    assert record["sparsity"] == pytest.approx(run.plan.good, abs=2e-3)
    assert any(event["event"] == "rollback" for event in read_events(run.directory / "log.jsonl"))


@pytest.mark.slow
def test_nothing_pruned_is_an_error(tmp_path):
    with pytest.raises(ToolError, match="nothing was pruned"):
        go(tmp_path, max_drop=1e-9, stages=1, metric="killing:minus_zeros")
    assert read_record(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_max_params_and_max_flops_are_kept(tmp_path):
    _, record = go(tmp_path, max_params=500)
    assert record["nonzero"] <= 500
    assert record["nonzero"] >= 495
    for rounds in (0, 12):
        _, record = go(tmp_path, max_flops="30%", mask_search_rounds=rounds, out=f"rounds-{rounds}")
        assert 0.25 * record["macs_dense"] <= record["macs_sparse"] <= 0.3 * record["macs_dense"]


def test_macs_are_counted_per_example():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(48, 5))
    macs = count_macs(model, torch.randn(7, 2, 4, 4), lambda m, x: m(x))
    assert macs == {"0.weight": 16 * 3 * 2 * 9, "2.weight": 48 * 5}
    sequence = nn.Linear(4, 6)
    assert count_macs(sequence, torch.randn(2, 9, 4), lambda m, x: m(x)) == {"weight": 9 * 24}


def test_a_plan_brackets_the_limit():
    plan = Plan([0.5, 0.8, 0.9, 0.95], max_drop=0.05, precision=0.01)
    tried = []
    while (target := plan.next(lambda s: s**4)) is not None:
        tried.append(target)
        plan.result(target, 0.0 if target < 0.5 else (target - 0.5) ** 2)  # the limit is 0.7236
    assert plan.good <= 0.7237 <= (plan.bad or 1)
    assert (plan.bad or 1) - plan.good <= 0.01
    assert len(tried) <= 12


def test_a_plan_takes_up_again_what_a_long_step_could_not_reach():
    plan = Plan([0.5, 0.9, 0.95], max_drop=0.01, precision=0.01)
    before = 0.0
    while (target := plan.next(lambda s: s**4)) is not None:
        # steps of more than 0.1 fail, and so does everything above 0.93; a drop of exactly the limit is fine
        fails = target - before > 0.6 * (1 - before) or target > 0.93
        if plan.result(target, 0.02 if fails else 0.1 - 0.09):
            before = target
    assert 0.92 <= plan.good <= 0.93


def test_multiply_adds_of_attention() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = count_macs(layer, torch.randn(3, 5, 8), lambda model, x: model(x))
    assert found == {
        "self_attn.in_proj_weight": 5 * 3 * 8 * 8,
        "self_attn.out_proj.weight": 5 * 8 * 8,
        "linear1.weight": 5 * 8 * 16,
        "linear2.weight": 5 * 8 * 16,
    }


@pytest.mark.parametrize("limit", [0.3, 0.4987, 0.5, 0.72, 0.9499])
def test_a_plan_does_not_repeat_a_trial_that_it_has_just_rejected(limit):
    plan = Plan([0.5, 0.8, 0.9, 0.95], max_drop=0.05, precision=0.01)
    tried = []
    while (target := plan.next(lambda s: s**4)) is not None:
        assert (plan.good, target) not in tried
        tried.append((plan.good, target))
        plan.result(target, 0.0 if target <= limit else 0.06)
    assert plan.good <= limit < (plan.bad or 1)
    assert (plan.bad or 1) - plan.good <= 0.05
