"""The picture and the table of a comparison."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fishleg.runs.compare import Comparison

RECORD = {
    "name": "net.py:make", "mode": "one-shot", "metric": "accuracy", "metric_unit": "%", "pattern": "global",
    "higher_is_better": True, "dense": {"metric": 1.0}, "sparse": {"metric": 0.9}, "sparsity": 0.9,
    "bytes_sparse": 100, "macs_dense": 1000, "macs_sparse": 100, "seconds": 1.0,
}  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Draw curves and return the axes."""
    found: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        found.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(curves: dict[str, list[tuple[float, float]]], **changes: Any) -> Any:
        records = dict.fromkeys(curves, RECORD | changes)
        assert Comparison(records, curves).draw(tmp_path / "comparison.png")
        return found[-1].axes[0]

    return draw


def looks(line: Any) -> tuple[Any, ...]:
    has_line = line.get_linestyle() not in ("None", "none", "")
    return has_line, line.get_marker(), line.get_color()


def test_single_points_are_marks_in_the_picture_and_in_the_legend(drawn: Any) -> None:
    axis = drawn({"magnitude": [(0.9, 0.8)], "fishleg": [(0.9, 0.8)]})
    points = [line for line in axis.lines if len(line.get_xdata()) == 1]
    assert len(points) == 2
    assert all(not looks(line)[0] for line in points)
    assert len({line.get_marker() for line in points}) == 2  # they may lie on top of each other
    handles, labels = axis.get_legend_handles_labels()
    assert labels == ["magnitude", "fishleg", "dense"]
    shown = axis.get_legend().get_lines()
    assert [looks(line) for line in shown] == [looks(line) for line in handles]


def test_curves_are_lines_in_the_picture_and_in_the_legend(drawn: Any) -> None:
    axis = drawn({"magnitude": [(0.5, 0.9), (0.9, 0.8)], "fishleg": [(0.5, 1.0), (0.9, 0.9)]})
    assert [looks(line)[0] for line in axis.get_legend().get_lines()] == [True, True, True]


def test_percentages_stay_between_0_and_100(drawn: Any) -> None:
    axis = drawn({"magnitude": [(0.01, 0.0), (0.999, 1.0)], "fishleg": [(0.01, 1.0), (0.999, 1.0)]})
    for low, high in (axis.get_xlim(), axis.get_ylim()):
        assert low >= 0
        assert high <= 100


def test_other_metrics_may_exceed_100(drawn: Any) -> None:
    curves = {"magnitude": [(0.5, -20.0), (0.9, 500.0)]}
    axis = drawn(curves, metric="perplexity", metric_unit="", dense={"metric": 20.0})
    assert axis.get_ylim()[0] < -20
    assert axis.get_ylim()[1] > 500


@pytest.mark.parametrize(("small", "share"), [({"macs_small": 300}, "30.0%"), ({}, "100.0%")])
def test_rows_count_as_removed_where_they_are_cut_out(small: dict[str, int], share: str) -> None:
    record = RECORD | {"pattern": "rows"} | small
    assert share in Comparison({"fishleg": record}, {"fishleg": [(0.9, 0.9)]}).table()
