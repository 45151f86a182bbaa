"""The commands of `python -m reproduction`. What they run is imported only when they run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "reproduction" / "results"
TOYS = ("init", "estimation", "ablation", "claims", "layer")
NETWORKS = ("unstructured", "semi_structured")
BENCH_DATA = """\b
Data and models are found through environment variables:
  FISHLEG_DATA      the directory that holds cifar-10-batches-bin (default ./data)
  FISHLEG_RESNET20  the state dict of a trained ResNet20
  FISHLEG_STSB      the directory that holds the CSV files of STS-B (default ./stsb)"""


class Group(click.Group):
    """A group whose errors are one line, without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (FileNotFoundError, ConnectionError, ImportError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("stopped; finished parts are kept, and the same command goes on", err=True)
            context.exit(130)


def _out(default: Path) -> Callable[[Command], Command]:
    shown = default.relative_to(ROOT) if default.is_absolute() else default
    return click.option(
        "--out",
        "-o",
        default=default,
        type=click.Path(path_type=Path, file_okay=False),
        help=f"Directory of the results [default: {shown}].",
    )


_again = click.option("--again", is_flag=True, help="Make all rows anew; the old file is renamed.")


def _say(line: str) -> None:
    click.echo(line, err=True)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """The paper's figures, and the benchmarks and experiments of fishleg.

    \b
    Try it (seconds):              python -m reproduction figure init --smoke
    A figure of the paper:         python -m reproduction figure estimation
    All reported ResNet18 runs:    python -m reproduction resnet18 cifar10
    A benchmark:                   python -m reproduction bench resnet20-oneshot
    Fill the tables of the docs:   python -m reproduction tables

    Work is divided into small units. The result of each is written at once, so that a stopped command goes on
    where it stopped. docs/reproduction.md and docs/results.md report the results.
    """


@main.command(short_help="One figure or table of the paper.")
@click.argument("name", metavar="NAME", type=click.Choice([*TOYS, *NETWORKS]))
@_out(Path("paper-out"))
@click.option("--smoke", is_flag=True, help="A version of a few seconds, to see that it works.")
@click.option("--config", help="For the networks: a TOML file, or the name of one in reproduction/configs "
              "[default: cifar10].")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path), help="For the networks: the directory of the "
              "datasets [$FISHLEG_DATA, ./data].")  # fmt: skip
@click.option("--download", is_flag=True, help="For the networks: fetch the dataset if it is not there.")
@click.option("--device", help="For the networks: cpu, cuda, ... [default: that of the configuration].")
@click.option("--jobs", type=click.IntRange(1), help="For the networks: processes that share the work and "
              "the cores. Two of one thread are faster than one of two threads.")  # fmt: skip
def figure(name: str, out: Path, smoke: bool, **networks: Any) -> None:
    """Run one figure or table of the paper (NAME); write its JSON file and its picture.

    \b
    init             the initialisation of Q: I against I/γ
    estimation       how well Q estimates the inverse Fisher matrix, by structure
    ablation         preconditioning, structures, one-shot pruning, blocks against oBERT
    claims           claims of the text: losses, probes, the start of Q, costs
    layer            a real layer: structures of Q, KFAC, and Q refined after a pruning
    unstructured     ResNet18: accuracy against sparsity, scorers and optimizers crossed
    semi_structured  ResNet18: the 2:4 table

    The first five take minutes, the networks take hours.
    """
    given = {key: value for key, value in networks.items() if value}
    unused = ", ".join(f"--{key}" for key in given if name not in NETWORKS or (smoke and key != "jobs"))
    if unused:
        raise click.UsageError(f"{unused}: for {' and '.join(NETWORKS)} only, and not with --smoke")
    import_module(f"reproduction.figures.{name}").run(out, smoke=smoke, progress=_say, **given)
    config = "smoke" if smoke else Path(given.get("config", "cifar10")).stem
    pictures = [out / f"{name}-{config}.png"] if name in NETWORKS else sorted(out.glob(f"{name}*.png"))
    click.echo("\n".join(map(str, pictures)))


@main.command(short_help="All reported runs with ResNet18 on a dataset.")
@click.argument("dataset", type=click.Choice(["cifar10", "tiny-imagenet"]))
@_out(Path("paper-out"))
def resnet18(dataset: str, out: Path) -> None:
    """Run all experiments with ResNet18 that docs/reproduction.md reports of DATASET (two hours)."""
    from reproduction.figures.resnet18.all_runs import run

    if failures := run(dataset, out, _say):
        raise click.ClickException("; ".join(failures))


@main.group(cls=Group, epilog=BENCH_DATA)
def bench() -> None:
    """Benchmarks on real networks, and of cost and robustness.

    Rows that are in the result file are kept, unless --again is given.
    """


def _benchmark(name: str, about: str) -> None:
    """Register a benchmark that has no options of its own."""

    @bench.command(name, help=about)
    @_out(RESULTS / "benchmarks")
    @_again
    def command(out: Path, again: bool) -> None:
        import_module(f"reproduction.benchmarks.{name.replace('-', '_')}").main(out, again=again)


_benchmark("resnet20-oneshot", "ResNet20 without training: all methods (35 CPU minutes).")
_benchmark("resnet20-rows", "Whole filters of ResNet20 (55 CPU minutes).")
_benchmark("damping", "The best damping of each method (15 CPU minutes).")
_benchmark("minilm-oneshot", "A sentence encoder without training (hours).")


@bench.command()
@_out(RESULTS / "benchmarks")
@_again
@click.option("--only", metavar="METHOD", help='One method, such as "FLS + FishLeg".')
def resnet20_gradual(out: Path, again: bool, only: str | None) -> None:
    """ResNet20, pruned and trained in turns (three CPU hours)."""
    from reproduction.benchmarks.resnet20_gradual import main

    main(out, again=again, only=only)


@bench.command()
@_out(RESULTS / "benchmarks")
@_again
@click.option("--final", is_flag=True, help="Then read the test images, once, with the chosen dampings.")
def resnet20_ladder(out: Path, again: bool, final: bool) -> None:
    """ResNet20: one ingredient after another (two CPU hours)."""
    from reproduction.benchmarks.resnet20_ladder import main

    main(out, again=again, final=final)


@bench.command()
@_out(RESULTS / "benchmarks")
@_again
@click.option(
    "--keep", required=True, type=click.Path(path_type=Path), help="Directory of the pruned models."
)
def minilm_splits(out: Path, again: bool, keep: Path) -> None:
    """FLS and oBERT on MiniLM: chance or not? (30 CPU minutes)"""
    from reproduction.benchmarks.minilm_splits import main

    main(out, keep, again=again)


@bench.command()
@click.argument("task", type=click.Choice(["digits", "cifar"]))
@_out(RESULTS / "benchmarks")
@_again
def training(task: str, out: Path, again: bool) -> None:
    """Training loss of FishLeg, SGD and Adam (minutes)."""
    from reproduction.benchmarks.training import main

    main(task, out, again=again)


@bench.command()
@_out(RESULTS / "benchmarks")
@click.option("--rounds", default=20, show_default=True, help="Turns of each variant.")
@click.option("--batch", default=128, show_default=True, help="Images in a batch.")
def cost(out: Path, rounds: int, batch: int) -> None:
    """The cost of FishLeg steps, in SGD steps (minutes)."""
    from reproduction.benchmarks.cost import main

    main(out, rounds, batch)


@bench.command()
@_out(RESULTS / "benchmarks")
@click.option("--kills", default=200, show_default=True, help="How often the runs are killed, in all.")
def kill_soak(out: Path, kills: int) -> None:
    """Killed runs must end with the same bits (minutes)."""
    from reproduction.benchmarks.kill_soak import main

    if not main(out, kills):
        raise click.ClickException("a run that was killed has other bits than an undisturbed one")


@bench.command()
@_out(RESULTS / "benchmarks")
def fault_soak(out: Path) -> None:
    """File systems that fail lose nothing (minutes)."""
    from reproduction.benchmarks.fault_soak import main

    if not main(out):
        raise click.ClickException("a fault of the file system was not told, or something was lost")


@bench.command()
@_out(RESULTS / "benchmarks")
def wrong_inputs(out: Path) -> None:
    """Every wrong input in a real process (15 minutes)."""
    from reproduction.benchmarks.wrong_inputs import main

    if not main(out):
        raise click.ClickException("a wrong input was not refused as it should be")


@bench.command()
@_out(RESULTS / "benchmarks")
@_again
@click.option("--seconds", default=600.0, show_default=True, help="How long each target is tried, in all.")
@click.option("--only", multiple=True, metavar="TARGET", help="recipe, checkpoint, packed, shrunk or "
              "state_dict; repeatable.")  # fmt: skip
@click.option("--work", default=Path("fuzz-out"), show_default=True, help="Directory of the inputs that "
              "reached new code, and of findings.", type=click.Path(path_type=Path))  # fmt: skip
def fuzz(out: Path, again: bool, seconds: float, only: tuple[str, ...], work: Path) -> None:
    """Damaged and hostile input files (50 minutes).

    With the package atheris, the inputs are guided by coverage.
    """
    from reproduction.benchmarks.fuzz import NAMES, main

    if unknown := [name for name in only if name not in NAMES]:
        raise click.UsageError(f"--only must be one of {', '.join(NAMES)}, got {unknown[0]}")
    if not main(out.resolve(), seconds=seconds, only=only, work=work.resolve(), again=again, progress=_say):
        raise click.ClickException("an input was neither read nor refused as it should be; see findings")


@main.command(short_help="Estimators of Q where the truth is known.")
@click.argument("name", metavar="NAME", type=click.Choice(["toy-a", "isotropic", "family", "ekfac"]))
@_out(RESULTS / "experiments")
@click.option("--seeds", type=click.IntRange(1), help="[default: 5; ekfac: 3]")
def experiment(name: str, out: Path, seeds: int | None) -> None:
    """Estimators of Q where the truth is known (a few minutes each).

    \b
    toy-a      full Q against the true inverse: the paper's estimator, ours, baselines
    isotropic  structured Q: isotropic probes, and probes aimed at the inverse
    family     a structure of Q on a trained layer against the best Q of that structure
    ekfac      learned Q against EKFAC, on held-out data
    """
    given = {"seeds": seeds} if seeds else {}
    if name == "ekfac":
        from reproduction.experiments import ekfac

        ekfac.main(out, **given)
    else:
        from reproduction.experiments import toys

        toys.main(name, out, **given)


@main.command(short_help="Fill the tables of the documents, copy their pictures.")
@click.argument("documents", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--check", is_flag=True, help="Change nothing; fail if anything is out of date.")
def tables(documents: tuple[Path, ...], check: bool) -> None:
    """Fill the tables of DOCUMENTS from reproduction/results, and copy the pictures that they show.

    A table stands between <!-- table: NAME --> and <!-- end -->. A picture is shown by its path in
    docs/pictures. Without DOCUMENTS: README.md and all pages of docs.
    """
    from reproduction import tables as module

    paths = [path.resolve() for path in documents] or module.documents()
    changed = list(module.outdated(paths)) if check else module.update(paths)
    for path in changed:
        click.echo(f"{'out of date' if check else 'updated'}: {path}")
    if check and changed:
        raise click.ClickException("run `python -m reproduction tables`")


@main.group(cls=Group, short_help="Reference runs: does a change change any bit?")
def golden() -> None:
    """Hashes of the weights and masks of reference runs: does a change of the code change any bit?

    \b
    python -m reproduction golden record before.json     # before the change
    python -m reproduction golden compare before.json    # after it
    """


@golden.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--only", multiple=True, metavar="PREFIX", help="Only the runs whose names begin so; repeatable."
)
def record(file: Path, only: tuple[str, ...]) -> None:
    """Run the reference runs and write their hashes to FILE."""
    from reproduction.golden import record

    record(file, only, _say)


@golden.command()
@click.argument("file", default=RESULTS / "golden.json", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--only", multiple=True, metavar="PREFIX", help="Only the runs whose names begin so; repeatable."
)
def compare(file: Path, only: tuple[str, ...]) -> None:
    """Run the reference runs and compare them with FILE.

    FILE is reproduction/results/golden.json by default.
    """
    from reproduction.golden import compare

    if different := compare(file, only, _say):
        raise click.ClickException(f"other bits: {', '.join(different)}")
