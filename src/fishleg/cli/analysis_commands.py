"""The commands that only look: sensitivity, inspect, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fishleg.cli.flags import Sections, flags_given, recipe_options
from fishleg.cli.group import (
    ERROR,
    json_option,
    recipe_of,
    recipe_option,
    run_directory,
    say,
    trust_option,
)
from fishleg.cli.output import ResultsCommand, show
from fishleg.formats.results import to_json
from fishleg.runs.errors import ToolError

_SENSITIVITY_HELP = """Predict how much loss each layer of MODEL costs if it alone is pruned.

\b
  fishleg sensitivity net.py:make --weights net.pt --data data.py:loader
  fishleg sensitivity net.py:make --weights net.pt --data data.py:loader --picture curves.png

This needs one estimate of Q, the inverse of the Fisher matrix, and no evaluation of a pruned model. The table
ends with the layers that are worth excluding. For MODEL and the data see `fishleg prune --help`.
"""

_INSPECT_HELP = """Show the sparsity, the pattern and the size of a checkpoint or a run.

\b
  fishleg inspect fishleg-run
  fishleg inspect model.safetensors --pattern 2:4

PATH is the directory of a run, one of its checkpoints, or a state dict (.safetensors or .pt).
"""

_EVAL_ALLOWED = ("eval_data", "metric", "device", "threads")  # beside the directory of a run
_EVAL_HELP = """Measure the accuracy (or the loss) of a model.

\b
The final model of a run:
  fishleg eval fishleg-run
The same on other data:
  fishleg eval fishleg-run --eval-data data.py:test
A model with given weights, which may be packed:
  fishleg eval net.py:make --weights fishleg-run/packed.safetensors --eval-data data.py:test

MODEL is the directory of a run, or a function as in `fishleg prune --help`, which also explains the data.
A run's directory names code, which runs: look at a directory from elsewhere before you use --trust.
"""


@click.command(
    cls=Sections, help=_SENSITIVITY_HELP, short_help="Predict which layers suffer most from pruning."
)
@click.argument("model", required=False)
@recipe_options(
    "model", "data", "pruning", "auxiliary",
    without=("measure_batches", "batchnorm_batches", "cuts", "refine_steps"),
    only=("sparsity", "seed", "device", "threads"),
)  # fmt: skip
@recipe_option
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Also draw the curves: a .png, .svg or .pdf file."
)
@json_option
def sensitivity(
    model: str | None, recipe_file: str | None, picture: Path | None, as_json: bool, **options: Any
) -> None:
    """The command `fishleg sensitivity`."""
    say("loading PyTorch")
    from fishleg.runs.sensitivity import analyse, check_picture

    if picture is not None:
        check_picture(picture)
    result = analyse(recipe_of(model, recipe_file, options), on_phase=say)
    if picture is not None:
        result.draw(picture)
    show(to_json(result.as_dict()) if as_json else result.table())


@click.command(cls=ResultsCommand, help=_INSPECT_HELP, short_help="Show what is in a checkpoint or a run.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--pattern", metavar="N:M",
    help="Check that a pattern (N:M, block:SIZE or rows) holds; the exit code is 1 if it does not.",
)  # fmt: skip
@json_option
@click.pass_context
def inspect(ctx: click.Context, path: Path, pattern: str | None, as_json: bool) -> None:
    """The command `fishleg inspect`."""
    from fishleg.runs.inspection import inspect_path

    found = inspect_path(path, pattern)
    show(to_json(found.as_dict()) if as_json else found.table())
    if found.holds is False:
        ctx.exit(ERROR)


@click.command("eval", cls=Sections, help=_EVAL_HELP, short_help="Measure the accuracy of a model.")
@click.argument("model", required=False)
@recipe_options("model", "data", only=("device", "threads"))
@click.option(
    "--run",
    "directory",
    type=click.Path(path_type=Path),
    help="The same as MODEL, for the directory of a run.",
)
@recipe_option
@trust_option
@json_option
def evaluate(
    model: str | None,
    recipe_file: str | None,
    directory: Path | None,
    trust: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """The command `fishleg eval`.

    Raises:
        ToolError: A run comes with other arguments, or the model cannot be evaluated.
    """
    if directory is not None:
        if model is not None:
            raise ToolError(f"--run {directory} names the model: leave out {model}")
        model = str(directory)
    found = run_directory(model, recipe_file, options, _EVAL_ALLOWED)
    say("loading PyTorch")
    from fishleg.runs.inspection import evaluate_recipe, evaluate_run

    if found is not None:
        result = evaluate_run(found, given=flags_given(options), trust=trust, on_phase=say)
    else:
        result = evaluate_recipe(recipe_of(model, recipe_file, options), on_phase=say)
    percentages = ("accuracy", "agreement")
    lines = [f"{k}: {100 * v:.2f} %" if k in percentages else f"{k}: {v:.4g}" for k, v in result.items()]
    show(to_json(result, indent=None) if as_json else "\n".join(lines))
