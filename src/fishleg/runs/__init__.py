"""Pruning runs on disk: recipe, directory, checkpoints, budgets, metrics and report.

The command line is a thin layer over this package. Python code can use it as well.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fishleg.runs.bench import bench_recipe, bench_run
    from fishleg.runs.compare import compare_methods
    from fishleg.runs.errors import Interrupted, ToolError
    from fishleg.runs.export import export_model, export_recipe, export_run
    from fishleg.runs.inspection import evaluate_recipe, evaluate_run, inspect_path
    from fishleg.runs.launch import resume, start
    from fishleg.runs.recipe import Recipe, load_recipe, make_recipe
    from fishleg.runs.run import Run
    from fishleg.runs.sensitivity import sensitivity
    from fishleg.runs.sources import Data

# Imported when first used: recipes and errors do not need torch, which takes seconds to import.
_HOMES = {
    "Data": "sources",
    "Interrupted": "errors",
    "Recipe": "recipe",
    "Run": "run",
    "ToolError": "errors",
    "bench_recipe": "bench",
    "bench_run": "bench",
    "compare_methods": "compare",
    "evaluate_recipe": "inspection",
    "evaluate_run": "inspection",
    "export_model": "export",
    "export_recipe": "export",
    "export_run": "export",
    "inspect_path": "inspection",
    "load_recipe": "recipe",
    "make_recipe": "recipe",
    "resume": "launch",
    "sensitivity": "sensitivity",
    "start": "launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fishleg.runs' has no attribute {name!r}")
    return getattr(import_module(f"fishleg.runs.{_HOMES[name]}"), name)


__all__ = [
    "Data",
    "Interrupted",
    "Recipe",
    "Run",
    "ToolError",
    "bench_recipe",
    "bench_run",
    "compare_methods",
    "evaluate_recipe",
    "evaluate_run",
    "export_model",
    "export_recipe",
    "export_run",
    "inspect_path",
    "load_recipe",
    "make_recipe",
    "resume",
    "sensitivity",
    "start",
]
