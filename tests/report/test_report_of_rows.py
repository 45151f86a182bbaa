"""What the report says about rows, axes, and all steps together."""

import re
from typing import Any

import pytest

from fishleg.report import render_report

DENSE = {"metric": 0.99, "loss": 0.03}


def make_run(**changes: Any) -> dict[str, Any]:
    run = {"status": "finished", "pattern": "rows", "mode": "staged", "metric": "accuracy"}
    run |= {"metric_unit": "%", "dense": DENSE, "sparse": DENSE, "sparsity": 0.3, "parameters": 24_000}
    run |= {"nonzero": 14_200, "macs_dense": 600_000, "macs_sparse": 443_000, "bytes_plain": 99_000}
    run |= {"bytes_sparse": 63_000, "parameters_small": 13_900, "bytes_small": 58_000}
    return run | {"macs_small": 450_000, "zero_rows_small": 0} | changes


def make_events(*metrics: float) -> list[dict[str, Any]]:
    return [
        {"event": "stage", "stage": i, "sparsity": 0.1 * i, "metric": metric}
        for i, metric in enumerate(metrics, 1)
    ]


def text_of(run: dict[str, Any], events: list[dict[str, Any]]) -> str:
    page = render_report(run, events, "").replace("\u00a0", " ")
    return re.sub(r"<title>.*?</title>|<[^>]+>", "\n", page.split("</style>")[1])


def cards_of(run: dict[str, Any]) -> dict[str, str]:
    page = render_report(run, [], "").replace("\u00a0", " ")
    found = re.findall(r'<div class="card"><h2>(.*?)</h2>(.*?)</div>', page)
    assert len(dict(found)) == len(found)
    return {title: " ".join(re.sub(r"<[^>]+>", " ", body).split()) for title, body in found}


def ends_of_axis(run: dict[str, Any], events: list[dict[str, Any]]) -> tuple[float, float]:
    """The values at the ends of the vertical axis of the first chart, from two of its ticks."""
    chart = render_report(run, events, "").split("</style>")[1].split('class="chart"')[1].split("</svg>")[0]
    found = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)</text>', chart)
    ticks = [(float(y) - 4, float(value)) for y, value in found]
    (low_y, low), (high_y, high) = ticks[0], ticks[-1]
    per_pixel = (high - low) / (high_y - low_y)
    return low + per_pixel * (316 - low_y), low + per_pixel * (30 - low_y)  # a chart is 360 pixels high


def test_the_axis_says_what_sparsity_counts() -> None:
    events = make_events(0.98)
    assert "sparsity [% of rows]" in text_of(make_run(), events)
    assert "prunable weights" not in text_of(make_run(), events)
    assert "sparsity [% of prunable weights]" in text_of(make_run(pattern="global"), events)


def test_rows_that_are_cut_out_have_one_number_of_parameters() -> None:
    cards = cards_of(make_run())
    assert cards["Parameters"].startswith("24.0 k → 13.9 k 57.9 % are left when the removed rows are cut out")
    assert cards["Arithmetic"].startswith("600 k → 450 k")
    assert "75.0 % of them are left" in cards["Arithmetic"]
    assert cards["File size"].startswith("99.0 kB → 58.0 kB small.safetensors, 1.7× smaller")
    assert not any("14.2 k" in card or "443 k" in card for card in cards.values())
    assert "zero row" not in cards["Parameters"]


@pytest.mark.parametrize(("rows", "said"), [(1, "1 zero row stays"), (12, "12 zero rows stay")])
def test_zero_rows_that_could_not_be_cut(rows: int, said: str) -> None:
    assert said in cards_of(make_run(zero_rows_small=rows))["Parameters"]


def test_rows_that_are_not_cut_out_save_nothing() -> None:
    run = make_run()
    for name in ("parameters_small", "bytes_small", "macs_small", "zero_rows_small"):
        del run[name]
    cards = cards_of(run)
    assert cards["Parameters"].startswith("24.0 k 59.2 % are not zero")
    assert "stay in the model as zeros" in cards["Parameters"]
    assert cards["Arithmetic"] == "600 k multiply-adds per example No row is cut out."


def test_single_zeros_count_as_before() -> None:
    run = make_run(pattern="global")
    for name in ("parameters_small", "bytes_small", "macs_small", "zero_rows_small"):
        del run[name]
    cards = cards_of(run)
    assert cards["Parameters"] == "24.0 k → 14.2 k 59.2 % are not zero"
    assert "73.8 % of them use a weight that is not zero" in cards["Arithmetic"]


def test_a_smaller_model_that_is_no_faster_is_not_explained_by_zeros() -> None:
    run = make_run(speed={"dense_ms": 1.0, "sparse_ms": 1.0, "what": "one batch of 64, removed rows cut out"})
    assert "Zeros alone" not in cards_of(run)["Speed"]


@pytest.mark.parametrize("metrics", [(1.0, 0.5), (1.0,), (0.99, 0.999), (0.0, 0.4), (0.0,)])
def test_percentages_stay_between_0_and_100(metrics: tuple[float, ...]) -> None:
    last = {"metric": metrics[-1]}
    bottom, top = ends_of_axis(make_run(dense={"metric": metrics[0]}, sparse=last), make_events(*metrics))
    assert -0.01 < bottom <= 100 * min(metrics) + 0.01
    assert 100 * max(metrics) - 0.01 <= top < 100.01


def test_no_word_of_triangles_without_a_point_outside() -> None:
    """A range that was widened to a percentage point may hold all points again."""
    events = [
        {"event": "prune", "stage": 1, "sparsity": 0.3, "metric": 0.995},
        {"event": "train", "stage": 1, "step": 1, "steps": 1, "loss": 0.1},
        {"event": "stage", "stage": 1, "sparsity": 0.3, "metric": 0.9925},
    ]
    run = make_run(mode="gradual", dense={"metric": 0.9924}, sparse={"metric": 0.9925})
    assert "triangle" not in text_of(run, events)
    events[0]["metric"] = 0.2
    assert "triangle" in text_of(run, events)


def test_the_legend_has_a_line_where_the_chart_has_one() -> None:
    def legend(*metrics: float) -> str:
        page = render_report(make_run(), make_events(*metrics), "")
        return page.split('<ul class="key">')[1].split("</li>")[0]

    assert 'class="line"' in legend(0.98, 0.97)
    assert 'class="line"' not in legend(0.98)


def test_the_loss_of_q_has_a_key_of_its_own() -> None:
    event = {"event": "q", "step": 1, "gauge": 0.1, "phase": "estimate"}
    assert "auxiliary loss" in text_of({}, [event | {"auxiliary_loss": -3.0}])
    assert "auxiliary loss" not in text_of({}, [event | {"loss": -3.0}])


TOTAL = {"predicted": 0.0154, "measured": 0.149, "steps": 7, "verdict": None}
PRUNE = {"event": "prune", "stage": 1, "sparsity": 0.1, "predicted": 0.002, "measured": 0.003}


def test_all_steps_together() -> None:
    text = text_of(make_run(total=TOTAL), [PRUNE])
    said = "All 7 steps together: the KL divergence from the outputs of the dense model is 0.149."
    assert said in text
    assert "The sum of the predictions is 0.0154; measured is 9.7 times as much." in text
    page = render_report(make_run(total=TOTAL), [PRUNE], "")
    assert "all steps: predicted 0.0154, measured 0.149" in page
    assert "all steps together" in page
    assert "banner" not in page.split("</style>")[1]


def test_a_verdict_is_a_warning() -> None:
    total = TOTAL | {"verdict": "the model <does> not hold"}
    page = render_report(make_run(total=total), [PRUNE], "")
    banner = page.split('<div class="banner bad"')[1].split("</div>")[0]
    assert "The predictions do not add up" in banner
    assert "not hold" not in banner  # which stands among the warnings of the run
    assert "9.7 times as much" in banner


def test_totals_that_are_not_all_known() -> None:
    section = "Predicted and measured increase of the loss"
    magnitude = text_of(make_run(total=TOTAL | {"predicted": None}), [])
    assert section in magnitude
    assert "dense model is 0.149" in magnitude
    assert "sum of the predictions" not in magnitude
    assert section not in text_of(make_run(total=None), [])
    assert section not in text_of(make_run(total={"predicted": 1.0}), [])
    one = text_of(make_run(total=TOTAL | {"steps": 1}), [PRUNE])
    assert "The whole pruning: the KL divergence" in one
    assert "all steps" not in one
    zero = text_of(make_run(total=TOTAL | {"predicted": 0.0}), [PRUNE])
    assert "The sum of the predictions is 0." in zero
    same = text_of(make_run(total=TOTAL | {"predicted": 0.15}), [PRUNE])
    assert "predictions is 0.15: both agree." in same
