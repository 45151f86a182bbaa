"""One self-contained HTML page from the record of a pruning run.

A run keeps run.json and log.jsonl up to date, so the report of an interrupted or running run can be written
too. The page needs no network and no scripts.
"""

from __future__ import annotations

from fishleg.report.next_steps import next_steps, short_path
from fishleg.report.page import render_report, write_report

__all__ = ["next_steps", "render_report", "short_path", "write_report"]
