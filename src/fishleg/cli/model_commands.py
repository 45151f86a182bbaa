"""The commands that carry a model on: export, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fishleg.cli.flags import Sections, flags_given, recipe_options
from fishleg.cli.group import json_option, recipe_of, recipe_option, run_directory, say, trust_option
from fishleg.cli.output import show
from fishleg.formats.results import to_json
from fishleg.runs.errors import ToolError

_EXPORT_HELP = """Write a model to a file that other programs can load.

\b
The final model of a run:
  fishleg export fishleg-run --to model.onnx
A model with given weights:
  fishleg export net.py:make --weights net.pt --eval-data data.py:test --to model.onnx

\b
The suffix of FILE names the format:
  .onnx          ONNX, for ONNX Runtime and others; needs pip install 'fishleg[onnx]'
  .pt2           an archive of torch.export, for programs with PyTorch; the model's code is not needed
  .safetensors   a state dict

A run with --pattern rows is exported without the removed rows. The outputs of an .onnx or .pt2 file are
compared with those of the PyTorch model at three batch sizes before the file is written. The first dimension
of the inputs, the batch, may have any size. An existing file is never written over.

MODEL is the directory of a run, or a function as in `fishleg prune --help`. A run's directory names code,
which runs: look at a directory from elsewhere before you use --trust.
"""

_BENCH_HELP = """Measure how long a forward pass takes: the dense model beside the sparse one.

\b
  fishleg bench fishleg-run
  fishleg bench fishleg-run --batch-size 1,8,64 --threads 1 --onnx model.onnx
  fishleg bench net.py:make --weights net.pt --eval-data data.py:test

The models take turns in one process. The table shows the median time of a pass, its quartiles, and how many
times as fast as the dense model each model is. A run with --pattern rows has a model without the removed
rows, which is measured as well, and so is an ONNX file of the model (--onnx) in ONNX Runtime.

MODEL is the directory of a run, or a function as in `fishleg prune --help`. A run's directory names code,
which runs: look at a directory from elsewhere before you use --trust.
"""


@click.command(cls=Sections, help=_EXPORT_HELP, short_help="Write a model as ONNX, .pt2 or .safetensors.")
@click.argument("model", required=False)
@click.option("--to", "path", metavar="FILE", required=True, help="The file to write.")
@click.option(
    "--packed", is_flag=True, help="A .safetensors file with one bit per weight and the kept values."
)
@click.option(
    "--shrunk/--no-shrunk", default=True, help="Cut removed rows out, if the run has them. [default: yes]"
)
@recipe_options("model", "data", without=("train_data", "metric"), only=("device", "threads"))
@recipe_option
@trust_option
@json_option
def export(
    model: str | None,
    path: str,
    packed: bool,
    shrunk: bool,
    recipe_file: str | None,
    trust: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """The command `fishleg export`."""
    directory = run_directory(model, recipe_file, options)
    say("loading PyTorch")
    from fishleg.runs.export import export_recipe, export_run

    if directory is not None:
        given = flags_given(options)
        result = export_run(
            directory, Path(path), packed=packed, shrunk=shrunk, given=given, trust=trust, on_phase=say
        )
    else:
        recipe = recipe_of(model, recipe_file, options)
        result = export_recipe(recipe, Path(path), packed=packed, on_phase=say)
    show(to_json(result.as_dict()) if as_json else result.text())


@click.command(cls=Sections, help=_BENCH_HELP, short_help="Measure the time of a forward pass.")
@click.argument("model", required=False)
@click.option(
    "--batch-size", "batch_sizes", metavar="N,N,...", default="1,32", show_default=True,
    help="The batch sizes to measure at.",
)  # fmt: skip
@click.option(
    "--seconds", metavar="X", type=float, default=2.0, show_default=True,
    help="How long to measure at each batch size.",
)  # fmt: skip
@click.option("--onnx", metavar="FILE", help="Measure this ONNX file of the model in ONNX Runtime as well.")
@recipe_options("model", "data", without=("train_data", "metric"), only=("device", "threads"))
@recipe_option
@trust_option
@json_option
def bench(
    model: str | None,
    batch_sizes: str,
    seconds: float,
    onnx: str | None,
    recipe_file: str | None,
    trust: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """The command `fishleg bench`."""
    sizes, file = _batch_sizes(batch_sizes), None if onnx is None else Path(onnx)
    directory = run_directory(model, recipe_file, options)
    say("loading PyTorch")
    from fishleg.runs.bench import bench_recipe, bench_run

    if directory is not None:
        given = flags_given(options)
        result = bench_run(directory, sizes, seconds, file, given, trust=trust, on_phase=say)
    else:
        recipe = recipe_of(model, recipe_file, options)
        result = bench_recipe(recipe, sizes, seconds, file, on_phase=say)
    show(to_json(result.as_dict()) if as_json else result.table())


def _batch_sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ToolError(f"--batch-size must be whole numbers such as 1,32, got {text!r}") from None
