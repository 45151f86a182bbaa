"""The tables of the documents: made from the committed results, and up to date."""

import json
from pathlib import Path

import pytest

from reproduction import tables
from reproduction.harness import RESULTS, cell, fill
from reproduction.tables.resnet18 import Parts, cost, makespan


def test_hours_on_two_cores_follow_from_the_parts(tmp_path: Path) -> None:
    dense = {"weights": "w", "curve": [{"cpu_seconds": 3600.0}]}
    arms = {f"arm {i}": {"cpu_seconds": 3600.0 * hours} for i, hours in enumerate((3, 1, 1))}
    units = {"dense": dense, **arms}
    (tmp_path / "unstructured-cifar10.json").write_text(json.dumps({"units": units}))
    last = cost(tmp_path).splitlines()[-1]
    # one hour of waiting for the dense model, then one process has three hours' work and the other two
    assert last == "| all of cifar10 |  | 6.00 | 4.00 |"


@pytest.mark.parametrize(
    ("experiments", "hours"),
    [
        ([("a", 1.0, [1.0])], 2.0),
        ([("a", 1.0, [1.0, 1.0])], 2.0),  # one waits for the dense model
        ([("a", 1.0, [1.0]), ("b", 1.0, [1.0])], 2.0),  # each trains its own
        ([("a", 1.0, [1.0]), ("a", 1.0, [1.0])], 2.0),  # of the same dense model
        ([("a", 0.0, [4.0]), ("a", 0.0, [1.0, 1.0, 1.0])], 4.0),  # from opposite ends
        ([("a", 0.0, [1.0, 1.0, 1.0, 3.0])], 4.0),  # the longest comes last
    ],
)
def test_two_processes_take_parts_from_opposite_ends(experiments: list[Parts], hours: float) -> None:
    assert makespan(experiments) == hours


needs_results = pytest.mark.skipif(
    not RESULTS.is_dir(), reason="the results are not part of the source distribution"
)


@needs_results
def test_documents_and_pictures_are_up_to_date() -> None:
    assert list(tables.outdated(tables.documents())) == []


@needs_results
def test_every_table_is_shown() -> None:
    texts = [path.read_text("utf-8") for path in tables.documents()]
    shown = [name for name in tables.all_tables() if any(f"<!-- table: {name} -->\n|" in t for t in texts)]
    missing = set(tables.all_tables()) - set(shown)
    assert {name for name in missing if not name.endswith("-short")} == set()  # README.md chooses among these


@needs_results
def test_documents_are_filled_and_their_pictures_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PICTURES", tmp_path / "pictures")
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- table: cost -->\n| old |\n<!-- end -->\n![x](pictures/init.png) ![y](pictures/other.png)"
    )
    changed = [page, tmp_path / "pictures" / "init.png"]
    assert list(tables.outdated([page])) == changed
    assert tables.update([page]) == changed
    assert tables.outdated([page]) == {}
    assert "| all of cifar10 |" in page.read_text()


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        fill("<!-- table: nothing -->\n<!-- end -->", {})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        ("none", "none"),
        (0.0123456, "0.0123"),
        (1305.0, "1305"),
        (0.00003, "3.00e-05"),
        ({"mean": 0.5, "sem": 0.0123}, "0.5 ± 0.01"),
        ({"mean": None, "sem": 0.0}, "–"),
    ],
)
def test_cells(value: object, shown: str) -> None:
    assert cell(value) == shown
