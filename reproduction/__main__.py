"""`python -m reproduction FIGURE`: a figure or table of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fishleg.cli.commands import _check_directory
from fishleg.runs.errors import Interrupted, ToolError

NETWORKS = ("unstructured", "semi_structured")


@click.command()
@click.argument("figure", type=click.Choice(["init", "estimation", "ablation", "claims", "layer", *NETWORKS]))
@click.option("--out", "-o", default="paper-out", show_default=True, type=click.Path(path_type=Path))
@click.option("--smoke", is_flag=True, help="A version of a few seconds, to see that it works.")
@click.option("--config", help="For the networks: a TOML file, or cifar10 (default; -preset, -obs16, "
              "-short, -crossed), tiny-imagenet (-preset, -obs16), full-cifar10 (-ours), full-tiny-imagenet "
              "(-ours)")  # fmt: skip
@click.option(
    "--data", type=click.Path(path_type=Path), help="Where the datasets are [$FISHLEG_DATA, ./data]."
)
@click.option("--download", is_flag=True, help="Fetch the dataset if it is not there, and check it.")
@click.option("--device", help="For the networks: cpu, cuda, ... [the configuration's]")
@click.option("--jobs", type=click.IntRange(1), help="For the networks: processes that share the work and "
              "the cores; two of one thread do more than one of two.")  # fmt: skip
def reproduce(figure: str, out: Path, smoke: bool, **networks: Any) -> None:
    """A figure of the paper: runs the experiment, writes its JSON and picture.

    \b
    init             the initialisation of Q: I against I/gamma
    estimation       how well Q estimates the inverse Fisher, by structure
    ablation         preconditioning, structures, one-shot pruning, blocks against oBERT
    claims           what the paper says beside its figures: losses, probes, the start of Q, costs
    layer            a real layer: structures of Q, KFAC beside them, Q refined after a pruning
    unstructured     ResNet18: accuracy against sparsity, scorers and optimizers crossed
    semi_structured  ResNet18: the 2:4 table

    Minutes for the first five, hours for the networks; an interrupted one goes on where it was.
    docs/reproduction.md says what came out.
    """
    from importlib import import_module

    given = {name: value for name, value in networks.items() if value}
    unused = ", ".join(f"--{name}" for name in given if figure not in NETWORKS or (smoke and name != "jobs"))
    if unused:
        raise ToolError(f"{unused}: for {' and '.join(NETWORKS)} only, and not with --smoke")
    _check_directory(out)
    run = import_module(f"reproduction.paper.{figure}").run
    try:
        run(out, smoke=smoke, progress=lambda line: click.echo(line, err=True), **given)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ToolError(str(error)) from error
    except KeyboardInterrupt:
        raise Interrupted("stopped; what was finished is kept, and the same command goes on") from None
    config = "smoke" if smoke else Path(given.get("config", "cifar10")).stem
    named = [out / f"{figure}-{config}.png"] if figure in NETWORKS else sorted(out.glob(f"{figure}*.png"))
    click.echo("\n".join(map(str, named)))


if __name__ == "__main__":
    reproduce()
