"""The two kinds of JSON files that hold the results of units.

A figure has a `RecordFile`: {"settings", "summary", "units": {key: result}, "code": {key: version}}. All
units of one file share the settings; the key names the seed. A benchmark has a `RowsFile`: a list of rows. A
row holds the settings of its unit (among them the seed), its result, and the version of the code.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from fishleg.formats.results import write_json
from reproduction.harness.statistics import plain

Results = dict[str, Any]


class ResultFile(Protocol):
    """What the unit runner needs of a file."""

    path: Path

    def read(self) -> Results:
        """The results by key; empty if the file cannot be added to."""

    def add(self, key: str, result: Any) -> Any:
        """Write the result of one more unit; returns it as `read` will."""

    def fault(self) -> str | None:
        """Why the file that is there cannot be added to."""


class RecordFile:
    """Results of units that share their settings; numbers are kept to six significant digits."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))

    def read(self) -> Results:
        return dict(self._record()["units"])

    def add(self, key: str, result: Any) -> Any:
        record, result = self._record(), plain(result)
        self._write(record["units"] | {key: result}, record["code"] | {key: code_version()})
        return result

    def fault(self) -> str | None:
        content = _content(self.path)
        if isinstance(content, dict) and content.get("settings") == self.settings:
            return None
        return "is not whole" if content is None else "has other settings"

    def finish(self, summary: Mapping[str, Any]) -> Results:
        """Write and return the whole record, with the summary of the results."""
        record = self._record()
        return self._write(record["units"], record["code"], summary=plain(summary))

    def _record(self) -> dict[str, Any]:
        record = _content(self.path) if self.fault() is None else {}
        return {"units": record.get("units", {}), "code": record.get("code", {})}

    def _write(self, units: Results, code: dict[str, str], **more: Any) -> dict[str, Any]:
        record = {"settings": self.settings, **more, "units": units, "code": code}
        write_json(self.path, record)
        return record


class RowsFile:
    """Results of units that have settings of their own, given as one dictionary per unit."""

    def __init__(self, path: Path, settings: Sequence[Mapping[str, Any]]) -> None:
        self.path, self.settings = path, {describe(fields): dict(fields) for fields in settings}

    def read(self) -> Results:
        rows, found = self._rows(), {}
        for key, fields in self.settings.items():
            for row in rows:
                if all(row.get(name) == value for name, value in fields.items()):
                    found.setdefault(key, row)
        return found

    def add(self, key: str, result: Any) -> Any:
        row = json.loads(json.dumps({**self.settings[key], **result, "code": code_version()}))
        write_json(self.path, [*self._rows(), row])
        return row

    def fault(self) -> str | None:
        return None if isinstance(_content(self.path), list) else "is not whole"

    def _rows(self) -> list[dict[str, Any]]:
        return _content(self.path) if self.fault() is None else []


def _content(path: Path) -> Any:
    """What the JSON file holds; None if there is none, or if it is damaged."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def describe(fields: Mapping[str, Any]) -> str:
    """The settings of a unit in one line, which is also its key."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def put_aside(path: Path) -> Path:
    """Rename a file that cannot be added to. No file that was put aside before is overwritten."""
    names = (path.with_suffix(f".old{number}.json") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.replace(aside)
    return aside


@cache
def code_version() -> str:
    """Versions of fishleg and torch, and the commit where git knows it ("+" if there are changes)."""
    found = f"fishleg {metadata.version('fishleg')}, torch {torch.__version__}"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return found
    return f"{found}, commit {commit}"
