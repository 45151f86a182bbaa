"""The commands that prune: prune, resume, compare."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fishleg.cli.display import WarningsOnly, make_display
from fishleg.cli.flags import Sections, recipe_options
from fishleg.cli.group import json_option, quiet_option, recipe_of, recipe_option, say, trust_option
from fishleg.cli.output import ResultsCommand, show
from fishleg.formats.results import to_json
from fishleg.runs.directory import check_unused
from fishleg.runs.events import Listener
from fishleg.runs.recipe import SECTIONS, load_recipe

if TYPE_CHECKING:
    from fishleg.runs.run import Run

_PRUNE_HELP = """Prune MODEL and write a sparse checkpoint and a report.

\b
Remove 90 % of the weights:
  fishleg prune net.py:make --weights net.pt --data data.py:loader -s 90%
Keep 2 of every 4 weights:
  fishleg prune net.py:make --data data.py:loader --pattern 2:4
Remove 30 % of the output channels, for a smaller and faster model, and train in between:
  fishleg prune net.py:make --data data.py:loader -s 30% --pattern rows --mode gradual --epochs 1
Train for two epochs after each pruning step:
  fishleg prune net.py:make --data data.py:loader -s 0.95 --mode gradual --epochs 2
Remove as much as possible, and lose at most 0.5 % accuracy:
  fishleg prune net.py:make --data data.py:loader --eval-data data.py:test --max-drop 0.5%

MODEL is a function without arguments that returns the model, such as net.py:make (a file) or
package.module:make (an installed module). Use --weights unless the function returns a trained model.
data.py:loader is a function that returns a DataLoader. workload:digits is a built-in model with its data.

The data need no labels. Without labels, agreement with the dense model is measured instead of accuracy, and
--mode gradual needs --distill.

\b
The directory --out receives:
  report.html          the results as a page for the browser
  model.safetensors    the sparse model: a plain state dict with zeros
  packed.safetensors   the same in a small file
  small.safetensors    with --pattern rows: the model without the removed rows, smaller and faster
  recipe.toml          all options of the run
  run.json, log.jsonl, log.csv, checkpoints/

An interrupted run continues with `fishleg resume DIRECTORY`. All flags can also be written into a file, see
--recipe and --print-recipe.
"""

_RESUME_HELP = """Continue an interrupted run from its last checkpoint.

\b
  fishleg resume fishleg-run

DIRECTORY is the --out of the run. The result is the same as without the interruption. If data, model or
machine have changed since the run began, a warning says so.

The recipe in DIRECTORY names code, which runs. Code that is neither below the current directory nor installed
runs only with --trust: look at a directory that comes from elsewhere first.
"""

_COMPARISON = "fishleg-comparison"  # where a comparison is written, unless --out says otherwise
_COMPARE_HELP = """Prune MODEL with several methods, and print one table.

\b
  fishleg compare workload:digits -s 0.95 --methods magnitude,fishleg --out comparison

All methods get the same budget. Each is a run in its own directory inside --out, which is fishleg-comparison
by default. The table is also written there as comparison.json, and with matplotlib as a picture. An
interrupted comparison continues if the same command is given again. For MODEL and the data see
`fishleg prune --help`.
"""


@click.command(
    cls=Sections, help=_PRUNE_HELP, short_help="Prune a model; write a sparse checkpoint and a report."
)
@click.argument("model", required=False)
@recipe_options(*SECTIONS)
@recipe_option
@click.option("--print-recipe", is_flag=True, help="Print all options as a recipe, and do not prune.")
@json_option
@quiet_option
def prune(
    model: str | None, recipe_file: str | None, print_recipe: bool, as_json: bool, quiet: bool, **options: Any
) -> None:
    """The command `fishleg prune`."""
    recipe = recipe_of(model, recipe_file, options)
    if print_recipe:
        recipe.check()
        show(recipe.to_toml().rstrip("\n"))
        return

    check_unused((Path.cwd() / recipe.run.out).resolve())  # before PyTorch is loaded

    def make(display: Listener) -> Run:
        from fishleg.runs import launch

        return launch.start(recipe, listeners=[display], command=f"fishleg {shlex.join(sys.argv[1:])}")

    _execute(make, as_json, quiet)


@click.command(cls=ResultsCommand, help=_RESUME_HELP, short_help="Continue an interrupted run.")
@click.argument("directory", type=click.Path(path_type=Path))
@trust_option
@json_option
@quiet_option
def resume(directory: Path, trust: bool, as_json: bool, quiet: bool) -> None:
    """The command `fishleg resume`."""

    def make(display: Listener) -> Run:
        from fishleg.runs import launch

        return launch.resume(directory, listeners=[display], trust=trust)

    _execute(make, as_json, quiet)


def _execute(make: Callable[[Listener], Run], as_json: bool, quiet: bool) -> None:
    """Make a run and do its work. The display is there from the first second."""
    display = WarningsOnly() if quiet else make_display()
    try:
        display.event({"event": "phase", "message": "loading PyTorch"})  # which takes seconds
        run = make(display)
        record = run.execute()
    finally:
        display.close()
    if not quiet:
        _show_next_steps(record, run.directory)
    show(to_json(record) if as_json else f"{run.directory / 'report.html'}")


def _show_next_steps(record: dict[str, Any], directory: Path) -> None:
    """Print the commands that a finished run leads to; the report has more."""
    from fishleg.report import next_steps, short_path

    steps = next_steps(record, short_path(directory, Path.cwd()))
    commands = [(title, code) for title, code in steps if code.startswith("fishleg ")]
    width = max(len(code) for _, code in commands)
    lines = [f"  {code:<{width}}   # {title[0].lower()}{title[1:]}" for title, code in commands]
    say("\n".join(["what next (the report has more):", *lines]))


@click.command(
    cls=Sections, help=_COMPARE_HELP, short_help="Prune a model with several methods; print one table."
)
@click.argument("model", required=False)
@click.option(
    "--methods", default="magnitude,obert,mfac,fishleg", show_default=True,
    help="The methods, separated by commas.",
)  # fmt: skip
@recipe_options(*SECTIONS, without=("method",))
@recipe_option
@json_option
def compare(model: str | None, methods: str, recipe_file: str | None, as_json: bool, **options: Any) -> None:
    """The command `fishleg compare`."""
    from fishleg.options.names import EMPIRICAL_METHODS
    from fishleg.runs.compare import compare_methods

    if options.get("out") is None:
        options["out"] = load_recipe(recipe_file).get("out") if recipe_file else None
        options["out"] = options["out"] or _COMPARISON
    # every run replaces the method; that of the common recipe must not contradict --empirical
    recipe = recipe_of(model, recipe_file, {**options, "method": next(iter(EMPIRICAL_METHODS))})
    names = [name.strip() for name in methods.split(",") if name.strip()]
    result = compare_methods(recipe, names, make_listener=_display_of)
    show(to_json(result.as_dict()) if as_json else result.table())


def _display_of(method: str) -> Listener:
    """Print the name of a method.

    Returns:
        A display of its run.
    """
    say(f"-- {method}")
    return make_display()
