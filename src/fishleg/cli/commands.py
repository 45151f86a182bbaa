"""The command line: a thin layer over `fishleg.runs`, which Python code can use as well.

Nothing heavy is imported before a command runs: `fishleg --help` answers at once.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

import click

import fishleg
from fishleg.cli.flags import Sections, flags_given, recipe_options
from fishleg.runs.errors import Interrupted, ToolError
from fishleg.runs.recipe import SECTIONS, load_recipe, make_recipe

ERROR, INTERRUPTED = 1, 130


class _Group(click.Group):
    """Errors of ours become one line and an exit code; --debug shows where they come from."""

    def invoke(self, ctx: click.Context) -> Any:
        logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except (Interrupted, KeyboardInterrupt) as error:
            click.echo(str(error) or "interrupted before anything was written", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            click.echo(f"error: {_message(error)}", err=True)
            ctx.exit(ERROR)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        from fishleg.options.declaration import nearest

        if args and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r}{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def _message(error: Exception) -> str:
    text = str(error).strip()
    if "Traceback" in text:  # what a worker of a DataLoader sends home
        text = text.splitlines()[-1]
    if isinstance(error, (ToolError, ValueError)):
        return text
    return f"{type(error).__name__}: {text} (fishleg --debug ... shows where)"


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show a traceback with errors.")
@click.version_option(fishleg.__version__, prog_name="fishleg")
def main(debug: bool) -> None:
    """Second-order pruning of PyTorch models: sparse, small, and still accurate.

    \b
    Try it:                fishleg prune workload:digits --sparsity 0.9
    Your model and data:   fishleg prune net.py:make --weights net.pt --data data.py:loader -s 0.9
    Within 1 % accuracy:   fishleg prune net.py:make ... --eval-data data.py:test --max-drop 1%
    What resists?          fishleg sensitivity net.py:make --weights net.pt --data data.py:loader
    After a crash:         fishleg resume fishleg-run

    net.py:make is a function of yours that returns the model, data.py:loader one that returns a DataLoader.
    """


_PRUNE_HELP = """Prune MODEL and write a sparse checkpoint and a report.

MODEL is net.py:make or package.module:make, a function without arguments that returns the model, or a
built-in workload (workload:digits). Without labels in the data everything works but
--mode gradual (unless --distill) and accuracy (agreement with the dense model is measured instead).

\b
fishleg prune net.py:make --weights net.pt --data data.py:loader --sparsity 0.9
fishleg prune net.py:make --data data.py:loader --pattern 2:4
fishleg prune net.py:make --data data.py:loader --mode gradual --train-data data.py:train --epochs 2
fishleg prune net.py:make --data data.py:loader --eval-data data.py:test --max-drop 0.5%
fishleg prune --recipe recipe.toml --out another-run

The directory --out gets: report.html, model.safetensors (a plain state dict with zeros),
packed.safetensors (the same, small), with --pattern rows small.safetensors (the model without the
removed rows, which is faster, too), log.jsonl, log.csv, run.json, recipe.toml and checkpoints.
"""


@main.command(cls=Sections, help=_PRUNE_HELP)
@click.argument("model", required=False)
@recipe_options(*SECTIONS)
@click.option(
    "--recipe", "recipe_file", metavar="FILE", help="A .toml, .yaml or .json file; flags win over it."
)
@click.option("--print-recipe", is_flag=True, help="Write the effective recipe to standard output and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the record of the run as JSON at the end.")
@click.option("--quiet", is_flag=True, help="No progress; warnings stay.")
def prune(
    model: str | None, recipe_file: str | None, print_recipe: bool, as_json: bool, quiet: bool, **options: Any
) -> None:
    """See _PRUNE_HELP, which is what `fishleg prune --help` shows."""
    recipe = _make(model, recipe_file, options)
    if print_recipe:
        recipe.check()
        click.echo(recipe.to_toml(), nl=False)
        return
    from fishleg.runs import run as runs

    run = runs.start(recipe, command=f"fishleg {shlex.join(sys.argv[1:])}")
    _execute(run, as_json, quiet)


def _make(model: str | None, recipe_file: str | None, options: dict[str, Any]) -> Any:
    given = flags_given(options)
    if model is not None:
        given["model"] = model
    recipe = make_recipe(load_recipe(recipe_file) if recipe_file else {}, given)
    if not recipe.model.model:
        raise ToolError("MODEL is missing: name the function that returns it, e.g. net.py:make")
    return recipe


def _execute(run: Any, as_json: bool, quiet: bool) -> None:
    from fishleg.cli.display import Warnings, make_display

    run.listen(Warnings() if quiet else make_display(run.evaluator.unit, run.evaluator.name))
    record = run.execute()
    if as_json:
        click.echo(json.dumps(record, indent=1))
    else:
        click.echo(f"{run.directory / 'report.html'}")


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the record of the run as JSON at the end.")
@click.option("--quiet", is_flag=True, help="No progress; warnings stay.")
def resume(directory: Path, as_json: bool, quiet: bool) -> None:
    """Go on with an interrupted run, to the very model it would have ended with."""
    from fishleg.runs import run as runs

    _execute(runs.resume(directory), as_json, quiet)


def _show_method(run: Any) -> None:
    from fishleg.cli.display import make_display

    click.echo(f"-- {run.recipe.pruning.method}", err=True)
    run.listen(make_display(run.evaluator.unit, run.evaluator.name))


@main.command(cls=Sections)
@click.argument("model", required=False)
@click.option("--methods", default="magnitude,obert,mfac,fishleg", show_default=True, help="Comma-separated.")
@recipe_options(*SECTIONS)
@click.option(
    "--recipe", "recipe_file", metavar="FILE", help="A .toml, .yaml or .json file; flags win over it."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def compare(model: str | None, methods: str, recipe_file: str | None, as_json: bool, **options: Any) -> None:
    """Several methods on the same budget: one table, one picture.

    \b
    fishleg compare workload:digits --sparsity 0.95 --methods magnitude,fishleg --out comparison

    Each method is a run of its own in a directory under --out; a comparison that was interrupted goes on
    with the next method when the same command is given again.
    """
    from fishleg.runs.compare import compare_methods

    recipe = _make(model, recipe_file, options)
    result = compare_methods(
        recipe, [m.strip() for m in methods.split(",") if m.strip()], on_run=_show_method
    )
    click.echo(json.dumps(result.as_dict(), indent=1) if as_json else result.table())


@main.command(cls=Sections)
@click.argument("model", required=False)
@recipe_options(
    "model", "data", "pruning", "auxiliary",
    without=("measure_batches", "batchnorm_batches", "cuts", "refine_steps"),
    only=("sparsity", "seed", "device", "threads"),
)  # fmt: skip
@click.option(
    "--recipe", "recipe_file", metavar="FILE", help="A .toml, .yaml or .json file; flags win over it."
)
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Also draw the curves into this PNG or SVG file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the curves as JSON.")
def sensitivity(
    model: str | None, recipe_file: str | None, picture: Path | None, as_json: bool, **options: Any
) -> None:
    """Which layers resist: predicted loss against sparsity for each, from Q alone.

    \b
    fishleg sensitivity net.py:make --weights net.pt --data data.py:loader

    One estimate of Q, no evaluation of pruned models. The table ends with layers worth excluding.
    """
    from fishleg.runs.sensitivity import analyse, check_picture

    if picture is not None:
        check_picture(picture)
    result = analyse(_make(model, recipe_file, options))
    if picture is not None:
        result.draw(picture)
    click.echo(json.dumps(result.as_dict(), indent=1) if as_json else result.table())


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--pattern", metavar="N:M", help="Check that an N:M or block:SIZE pattern holds; exit code 1 if not."
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_context
def inspect(ctx: click.Context, path: Path, pattern: str | None, as_json: bool) -> None:
    """What is in a checkpoint or a run: sparsity by layer, pattern, size, how it was made.

    \b
    fishleg inspect fishleg-run
    fishleg inspect model.safetensors --pattern 2:4
    """
    from fishleg.runs.inspection import inspect_path

    found = inspect_path(path, pattern)
    click.echo(json.dumps(found.as_dict(), indent=1) if as_json else found.table())
    if found.holds is False:
        ctx.exit(ERROR)


@main.command("eval", cls=Sections)
@click.argument("model", required=False)
@recipe_options("model", "data", only=("device", "threads"))
@click.option("--run", "directory", type=click.Path(path_type=Path), help="Evaluate the model of this run.")
@click.option(
    "--recipe", "recipe_file", metavar="FILE", help="A .toml, .yaml or .json file; flags win over it."
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def evaluate(
    model: str | None, recipe_file: str | None, directory: Path | None, as_json: bool, **options: Any
) -> None:
    """Accuracy (or loss) of a model with given weights, packed ones included.

    \b
    fishleg eval net.py:make --weights fishleg-run/packed.safetensors --eval-data data.py:test
    fishleg eval --run fishleg-run
    """
    from fishleg.runs.inspection import evaluate_recipe, evaluate_run

    if directory is not None:
        others = [model, recipe_file, *flags_given(options)]
        if any(others):
            raise ToolError("--run names the model, its data and all options: leave out everything else")
        result = evaluate_run(directory)
    else:
        result = evaluate_recipe(_make(model, recipe_file, options))
    shares = ("accuracy", "agreement")
    lines = [f"{k}: {100 * v:.2f} %" if k in shares else f"{k}: {v:.4g}" for k, v in result.items()]
    click.echo(json.dumps(result) if as_json else "\n".join(lines))


@main.command()
@click.option("--out", "-o", default="demo-out", show_default=True, help="Where results go.")
@click.pass_context
def demo(ctx: click.Context, out: str) -> None:
    """Train a small network on embedded digits and prune it with four methods (about a minute)."""
    _check_directory(Path(out))
    from fishleg.cli.demo import main as run_demo

    ctx.exit(run_demo(["--out", out]))


def _check_directory(out: Path) -> None:
    """Results can go there, or the reason why not before any work."""
    if not next(p for p in (out, *out.absolute().parents) if p.exists()).is_dir():
        raise ToolError(f"out: {out} cannot be written, there is a file in the way")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(as_json: bool) -> None:
    """What this machine has: devices, optional packages, data; what is missing and how to get it."""
    from fishleg.cli.doctor import diagnose, table

    found = diagnose()
    click.echo(json.dumps(found, indent=1) if as_json else table(found))


if __name__ == "__main__":
    main()
