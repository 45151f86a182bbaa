"""Measure the latency of a run's models: dense beside sparse, beside the shrunk one, beside ONNX Runtime."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.formats.onnx import OnnxModel, missing_packages
from fishleg.formats.traced import TensorCall, first_line, relative_difference
from fishleg.runs.errors import ToolError
from fishleg.runs.load import load_run, load_small
from fishleg.runs.recipe import Recipe
from fishleg.runs.setup import Phases, Prepared, prepare, quiet
from fishleg.runs.speed import measure_times
from fishleg.runtime.batches import move_batch, resize_batch
from fishleg.runtime.modes import evaluation_mode
from fishleg.runtime.random_state import seeded

_MOST_EXAMPLES = 65536
_MOST_SECONDS = 3600
_FEWEST, _MOST = 5, 10_000  # passes
_CLEARLY = 1.05  # a smaller gain may be due to the order in which the models take turns
_SAME = 1e-3  # outputs that differ by less, relative to the largest, belong to the same model


@dataclass(frozen=True)
class Timing:
    """The latency of one model at one batch size.

    Args:
        model: "dense", "sparse", "shrunk", "model", or "onnx".
        batch_size: The number of examples.
        median_ms: The median time of a forward pass in milliseconds.
        lower_ms: The lower quartile.
        upper_ms: The upper quartile.
        passes: The number of passes that were measured.
        speed: How many times as fast as the first model at this batch size.
    """

    model: str
    batch_size: int
    median_ms: float
    lower_ms: float
    upper_ms: float
    passes: int
    speed: float


@dataclass(frozen=True)
class Benchmark:
    """The latencies of several models.

    Args:
        timings: The latencies; at each batch size the first is the one that the others are compared with.
        threads: The number of threads.
        device: The device of the PyTorch models; ONNX Runtime uses the CPU.
        notes: What the numbers mean, in sentences.
    """

    timings: list[Timing]
    threads: int
    device: str
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return all facts as values for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return a table for the terminal."""
        speed = f"speed ({self.timings[0].model} = 1)"
        lines = [f"{'batch':>5}  {'model':<7} {'median':>12}  {'quartiles':^21} {speed:>18} {'passes':>7}"]
        for t in self.timings:
            spread = f"{t.lower_ms:.3f} to {t.upper_ms:.3f}"
            lines.append(
                f"{t.batch_size:>5}  {t.model:<7} {t.median_ms:>9.3f} ms  {spread:^21} {t.speed:>18.2f} "
                f"{t.passes:>7}"
            )
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        lines.append(f"forward passes on {self.device} with {threads}; the models take turns")
        return "\n".join([*lines, *self.notes])


def check_bench(batch_sizes: Sequence[int], seconds: float, onnx: Path | None = None) -> None:
    """Check all that can be checked before a model is loaded.

    Args:
        batch_sizes: The batch sizes to measure at.
        seconds: How long to measure at each of them.
        onnx: An ONNX file to measure as well.

    Raises:
        ToolError: A value is out of range, there is no such file, or a package is missing.
    """
    rule = f"different whole numbers in [1, {_MOST_EXAMPLES}]"
    wrong = [size for size in batch_sizes if not 1 <= size <= _MOST_EXAMPLES]
    if wrong or not batch_sizes or len(set(batch_sizes)) < len(batch_sizes):
        raise ToolError(f"batch_size must be {rule}, got {', '.join(map(str, batch_sizes)) or 'none'}")
    if not 0 < seconds <= _MOST_SECONDS:
        raise ToolError(f"seconds must be in (0, {_MOST_SECONDS}], got {seconds:g}")
    if onnx is not None:
        if not onnx.is_file():
            raise ToolError(f"onnx: there is no file {onnx}")
        if missing_packages(("onnxruntime",)):
            raise ToolError("running an .onnx file needs onnxruntime: pip install 'fishleg[onnx]'")


def bench_run(
    directory: Path,
    batch_sizes: Sequence[int] = (1, 32),
    seconds: float = 2.0,
    onnx: Path | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
    on_phase: Phases = quiet,
) -> Benchmark:
    """Measure the models of a run: dense, sparse, and with the pattern "rows" the shrunk one.

    Args:
        directory: The directory of the run.
        batch_sizes: The batch sizes to measure at.
        seconds: How long to measure at each of them.
        onnx: An ONNX file of the model, to measure in ONNX Runtime.
        given: Options that replace those of the recipe, such as the threads, by unique name.
        trust: Whether the recipe may name code that is neither below the current directory nor installed.
        on_phase: Receives a text before each step that may take long.

    Returns:
        The latencies.
    """
    check_bench(batch_sizes, seconds, onnx)
    prepared = load_run(directory, given, trust=trust, on_phase=on_phase)
    models = {"dense": prepared.dense, "sparse": prepared.model}
    small = load_small(prepared, directory)
    if small is not None:
        models["shrunk"] = small
    return _bench(prepared, models, batch_sizes, seconds, onnx, on_phase)


def bench_recipe(
    recipe: Recipe,
    batch_sizes: Sequence[int] = (1, 32),
    seconds: float = 2.0,
    onnx: Path | None = None,
    *,
    on_phase: Phases = quiet,
) -> Benchmark:
    """Measure the model that a recipe names.

    Args:
        recipe: The model, its weights, and data for an example batch.
        batch_sizes: The batch sizes to measure at.
        seconds: How long to measure at each of them.
        onnx: An ONNX file of the model, to measure in ONNX Runtime.
        on_phase: Receives a text before each step that may take long.

    Returns:
        The latencies.
    """
    check_bench(batch_sizes, seconds, onnx)
    prepared = prepare(recipe, prunes=False, on_phase=on_phase)
    return _bench(prepared, {"model": prepared.model}, batch_sizes, seconds, onnx, on_phase)


@torch.no_grad()
def _bench(
    prepared: Prepared,
    models: dict[str, nn.Module],
    batch_sizes: Sequence[int],
    seconds: float,
    onnx: Path | None,
    on_phase: Phases,
) -> Benchmark:
    with seeded(prepared.recipe.run.seed):  # a loader that shuffles
        drawn = prepared.draw_batch()
    device = next(prepared.model.parameters()).device
    session = None if onnx is None else _read_onnx(onnx)
    timings: list[Timing] = []
    notes: list[str] = []
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluation_mode(model))
        for size in batch_sizes:
            on_phase(f"measuring at batch size {size} ({seconds:g} s)")
            batch = move_batch(resize_batch(drawn, size), device)
            calls = {name: _model_call(prepared, model, batch) for name, model in models.items()}
            if session is not None and onnx is not None:
                call = _onnx_call(prepared, session, onnx, batch, size)
                notes += [note for note in [_compare(calls, call, onnx)] if note and note not in notes]
                calls["onnx"] = call
            timings += _timings(measure_times(calls, seconds, _FEWEST, _MOST, settle=1), size)
    notes += _verdict(timings)
    return Benchmark(timings, torch.get_num_threads(), str(device), notes)


def _model_call(prepared: Prepared, model: nn.Module, batch: Any) -> Callable[[], Tensor]:
    return lambda: prepared.forward(model, batch)


def _read_onnx(path: Path) -> OnnxModel:
    try:
        return OnnxModel(path)
    except ValueError as error:
        raise ToolError(f"onnx: {error}") from error


def _onnx_call(
    prepared: Prepared, session: OnnxModel, path: Path, batch: Any, size: int
) -> Callable[[], Tensor]:
    """Return the call of an ONNX model on a batch, after a first pass.

    Raises:
        ToolError: The model has other inputs than the batch.
    """
    call = TensorCall(prepared.model, batch, prepared.forward)
    found = dict(zip(call.names, call.tensors_of(batch), strict=True))
    if set(session.inputs) <= set(found):
        tensors = [found[name] for name in session.inputs]
    elif len(session.inputs) == len(found):  # of another program, with names of its own
        tensors = list(found.values())
    else:
        raise ToolError(
            f"onnx: the inputs of {path} are {', '.join(session.inputs)}, the batches have {', '.join(found)}"
        )
    try:
        session.run(tensors)
    except Exception as error:
        raise ToolError(f"onnx: {path} cannot be run on a batch of {size}: {first_line(error)}") from error
    return lambda: session.run(tensors)


def _compare(calls: Mapping[str, Callable[[], Tensor]], onnx: Callable[[], Tensor], path: Path) -> str:
    """Return a sentence about an ONNX model whose outputs are those of none of the other models."""
    found = onnx()
    differences = [relative_difference(call(), found) for call in calls.values()]
    if any(difference <= _SAME for difference in differences):
        return ""
    return f"{path} computes something else than each of the other models: is it from another run?"


def _timings(times: Mapping[str, list[float]], size: int) -> list[Timing]:
    medians = {name: statistics.median(found) for name, found in times.items()}
    first = next(iter(medians.values()))
    return [
        Timing(name, size, medians[name], *_quartiles(found), len(found), first / medians[name])
        for name, found in times.items()
    ]


def _quartiles(times: list[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
    return lower, upper


def _verdict(timings: Sequence[Timing]) -> list[str]:
    """Return sentences: which models are faster than the first, and why not the sparse one."""
    first = timings[0].model
    others = {t.model for t in timings} - {first}
    if not others:
        return ["There is nothing to compare with: bench the directory of a run, or add --onnx FILE."]
    base = {t.batch_size: t for t in timings if t.model == first}
    faster = [
        t
        for t in timings
        if t.model != first and t.speed >= _CLEARLY and t.upper_ms < base[t.batch_size].lower_ms
    ]
    than = "the model in PyTorch" if first == "model" else f"the {first} model"
    found = [f"{t.model} at batch size {t.batch_size} ({t.speed:.2f} times as fast)" for t in faster]
    said = [f"Clearly faster than {than}: {', '.join(found) or 'nothing'}."]
    if "sparse" in others and not any(t.model == "sparse" for t in faster):
        advice = "" if "shrunk" in others else " For speed, remove whole rows (fishleg prune --pattern rows)."
        said.append(f"The sparse model is not faster, because dense kernels multiply zeros, too.{advice}")
    if "onnx" in others:
        said.append("The gain of onnx is that of ONNX Runtime: zeros do not make it faster, cut rows do.")
    return said
