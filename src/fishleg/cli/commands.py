"""The command line `fishleg`: a thin layer over `fishleg.runs`, which Python code can use as well.

A command imports torch only when it runs, so that `fishleg --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path

import click

import fishleg
from fishleg.cli.analysis_commands import evaluate, inspect, sensitivity
from fishleg.cli.group import CommandGroup, json_option
from fishleg.cli.model_commands import bench, export
from fishleg.cli.output import ResultsCommand, show
from fishleg.cli.run_commands import compare, prune, resume
from fishleg.formats.results import to_json
from fishleg.runs.errors import ToolError

_HELP = """Prune PyTorch models with second-order information.

\b
Try it, with a built-in model and data:
  fishleg prune workload:digits --sparsity 0.9
Prune your model:
  fishleg prune net.py:make --weights net.pt --data data.py:loader --sparsity 0.9
See which layers suffer most:
  fishleg sensitivity net.py:make --weights net.pt --data data.py:loader
Continue after a crash:
  fishleg resume fishleg-run

net.py:make is a function of yours, without arguments, that returns the model. data.py:loader is a function
that returns a DataLoader. `fishleg COMMAND --help` explains each command.
"""

_DEMO_HELP = """Train a small network on built-in digits and prune it with four methods.

This takes about a minute and needs no data. The results are printed and written to demo.json, and with
matplotlib drawn in demo.png.
"""

_DOCTOR_HELP = """Show what is installed, what is missing, and how to install it.

The table lists versions, devices, optional packages, and whether the current directory can be written to.
"""


@click.group(
    cls=CommandGroup,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
@click.version_option(fishleg.__version__, prog_name="fishleg")
def main(debug: bool) -> None:
    """The command `fishleg`."""


@click.command(help=_DEMO_HELP, short_help="Train and prune a small network, in about a minute.")
@click.option("--out", "-o", default="demo-out", show_default=True, help="Directory for the results.")
@click.pass_context
def demo(ctx: click.Context, out: str) -> None:
    """The command `fishleg demo`."""
    _check_directory(Path(out))
    from fishleg.cli import demo as module

    module.check_out(Path(out))
    ctx.exit(module.main(["--out", out]))


def _check_directory(out: Path) -> None:
    """Check that results can be written to a directory, before any work.

    Raises:
        ToolError: A part of the path is a file.
    """
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ToolError(f"out: {out} cannot be written, {existing} is a file, not a directory")


@click.command(
    cls=ResultsCommand, help=_DOCTOR_HELP, short_help="Show what is installed and what is missing."
)
@json_option
def doctor(as_json: bool) -> None:
    """The command `fishleg doctor`."""
    from fishleg.cli.doctor import diagnose, table

    found = diagnose()
    show(to_json(found) if as_json else table(found))


for command in (prune, resume, compare, sensitivity, inspect, evaluate, export, bench, demo, doctor):
    main.add_command(command)


if __name__ == "__main__":
    main()
