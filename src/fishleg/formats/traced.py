"""A model as a graph of tensor operations, made by `torch.export`: the source of the exported formats."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.runtime.batches import (
    Forward,
    batch_size,
    default_forward,
    inputs_of,
    map_tensors,
    move_batch,
    resize_batch,
)
from fishleg.runtime.models import copy_model

_TOLERANCE = 1e-5  # of the largest output
# raised by torch's own code, about torch's own code
_TORCH_WARNINGS = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
    (r"The tensor attributes? .*_flat_weights.* (was|were) assigned during export", UserWarning),
)
_TORCH_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch.onnx", "onnxscript")


class TensorCall(nn.Module):
    """The call of a model on a batch, as a module whose arguments are the tensors of the batch.

    With the default `forward` these are the model's inputs, without the targets. With another one they are
    all tensors of the batch. Values that are not tensors stay as they are in the example.

    Args:
        model: The model.
        batch: An example of its batches.
        forward: `forward(model, batch) -> outputs`.

    Attributes:
        names: The names of the tensors: "input", or their keys or positions in the batch.

    Raises:
        ValueError: If the batch holds no tensor, or two of its tensors get the same name.
    """

    def __init__(self, model: nn.Module, batch: Any, forward: Forward = default_forward) -> None:
        super().__init__()
        self.model, self._call = model, forward
        self._takes_inputs = forward is default_forward
        named = list(_named_tensors(self._inputs(batch), ""))
        self.names = [name for name, _ in named]
        if not named:
            raise ValueError(f"a batch must hold at least one tensor, got {type(batch).__name__}")
        if len(set(self.names)) < len(named):
            raise ValueError(f"the tensors of a batch need different names, got {', '.join(self.names)}")
        self._example = (self._inputs(batch),)
        self._used = [True] * len(named)

    def _inputs(self, batch: Any) -> Any:
        return inputs_of(batch) if self._takes_inputs else batch

    def leave_out(self, unused: Sequence[str]) -> None:
        """Leave out arguments that the outputs do not depend on, such as targets.

        Args:
            unused: Their names.
        """
        every = [name for name, _ in _named_tensors(self._example[0], "")]
        self.names = [name for name in self.names if name not in unused]
        self._used = [name in self.names for name in every]

    def tensors_of(self, batch: Any) -> list[Tensor]:
        """Return the arguments that stand for a batch.

        Args:
            batch: A batch of the same format as the example.

        Returns:
            The tensors in the order of `names`.

        Raises:
            ValueError: If the batch has other tensors than the example.
        """
        found = dict(_named_tensors(self._inputs(batch), ""))
        missing = [name for name in self.names if name not in found]
        if missing:
            raise ValueError(f"the batch has no tensor {missing[0]!r}, but the example batch has it")
        return [found[name] for name in self.names]

    def forward(self, *tensors: Tensor) -> Tensor:
        """Call the model.

        Args:
            *tensors: The tensors of a batch in the order of `names`.

        Returns:
            The output tensor; if the model returns several tensors, the logits.
        """
        used, given = iter(self._used), iter(tensors)
        inputs = map_tensors(self._example[0], lambda tensor: next(given) if next(used) else tensor)
        wrapped = self._takes_inputs and not isinstance(inputs, Mapping)
        return self._call(self.model, (inputs,) if wrapped else inputs)


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the order of `map_tensors`, with names made of keys and positions."""
    if isinstance(value, Tensor):
        yield re.sub(r"\W", "_", name) or "input", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(item, f"{name}_{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _named_tensors(item, f"{name or 'input'}_{index}")


@dataclass(frozen=True)
class TracedModel:
    """A traced model, and the call that it was traced from.

    Args:
        program: The graph; its batch dimension is dynamic.
        call: The same call of the PyTorch model, on the CPU and in evaluation mode.
        batch: The batch that it was traced with, on the CPU.
    """

    program: torch.export.ExportedProgram
    call: TensorCall
    batch: Any

    def sizes(self) -> list[int]:
        """Return the batch sizes to compare at: that of the batch, one more, and 1."""
        size = batch_size(self.batch)
        return list(dict.fromkeys([size, size + 1, 1]))

    def verify(self, run: Callable[[list[Tensor]], Tensor], what: str) -> float:
        """Compare another form of the model with the PyTorch model, at several batch sizes.

        Args:
            run: Calls the other form on the tensors of a batch.
            what: The other form, for error messages.

        Returns:
            The largest difference of an output, relative to the largest output.

        Raises:
            ValueError: If the outputs differ by more than 1e-5 (in half precision: by more than its
                rounding), or the other form cannot be run.
        """
        worst = 0.0
        for size in self.sizes():
            tensors = self.call.tensors_of(resize_batch(self.batch, size))
            with torch.no_grad():
                expected = self.call(*tensors)
                try:
                    found = run(tensors)
                except Exception as error:
                    raise ValueError(
                        f"{what} cannot be run on a batch of {size}: {first_line(error)}"
                    ) from error
            difference, allowed = relative_difference(expected, found), _tolerance(expected)
            if not difference <= allowed:  # also if it is NaN
                raise ValueError(
                    f"{what} computes something else than the PyTorch model: on a batch of {size} the "
                    f"outputs differ by {difference:.3g} of the largest one (allowed: {allowed:.3g}). "
                    "Nothing is written"
                )
            worst = max(worst, difference)
        return worst


def trace_model(model: nn.Module, batch: Any, forward: Forward = default_forward) -> TracedModel:
    """Trace a copy of a model on the CPU, in evaluation mode, for batches of any size.

    Only the first dimension of the tensors is dynamic. All others are those of the batch.

    Args:
        model: The model; it is not changed.
        batch: A batch of its loader.
        forward: `forward(model, batch) -> outputs`.

    Returns:
        The traced model.

    Raises:
        ValueError: If `torch.export` cannot trace the model for batches of any size.
    """
    batch = move_batch(batch, torch.device("cpu"))
    if batch_size(batch) == 1:  # torch.export would take the size for a constant
        batch = resize_batch(batch, 2)
    call = TensorCall(copy_model(model).cpu().eval(), batch, forward)
    program = _export(call, batch)
    if forward is not default_forward:
        names = list(program.graph_signature.user_inputs)
        users = {node.name: node.users for node in program.graph.nodes}
        unused = [own for own, name in zip(call.names, names, strict=True) if not users[str(name)]]
        if len(unused) == len(names):
            raise ValueError("the outputs of the model do not depend on any tensor of the batch")
        if unused:
            call.leave_out(unused)
            program = _export(call, batch)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths and source lines of this machine
    return TracedModel(program, call, batch)


def _export(call: TensorCall, batch: Any) -> torch.export.ExportedProgram:
    size, tensors = batch_size(batch), call.tensors_of(batch)
    dynamic = torch.export.Dim("batch")
    shapes = tuple({0: dynamic} if t.dim() > 0 and len(t) == size else None for t in tensors)
    try:
        with torch.no_grad(), torch_messages_ignored():
            return torch.export.export(
                call, tuple(map(Tensor.clone, tensors)), dynamic_shapes=(shapes,), strict=False
            )
    except Exception as error:
        text = str(error)
        if "specialized it to be a constant" in text:
            raise ValueError(
                f"the model's code fixes the batch size {size}, but an exported file is for batches of any "
                f"size: write x.flatten(1) instead of x.view({size}, -1), for example"
            ) from error
        hint = ""
        if "data-dependent" in text:
            hint = ". The model's code depends on the values of a tensor, as in `if x.sum() > 0`"
        raise ValueError(f"torch.export cannot trace the model: {first_line(error)}{hint}") from error


def to_pt2(traced: TracedModel) -> tuple[bytes, float]:
    """Return the `torch.export` archive of a traced model, loaded back and compared with the model.

    Args:
        traced: The traced model.

    Returns:
        The bytes of a .pt2 file, and the largest relative difference that was found.
    """
    buffer = io.BytesIO()
    with torch_messages_ignored():
        torch.export.save(traced.program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
    difference = traced.verify(lambda tensors: loaded(*tensors), "the torch.export archive")
    return buffer.getvalue(), difference


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of two outputs, relative to the largest entry of the first.

    Args:
        expected: The outputs to compare with.
        found: Other outputs.

    Returns:
        The difference; infinite if the shapes differ, NaN if an output is not finite.
    """
    if found.shape != expected.shape:
        return torch.inf
    if not expected.numel():
        return 0.0
    wide = expected.detach().to("cpu", torch.float64)
    largest = float(wide.abs().max())
    difference = float((found.detach().to("cpu", torch.float64) - wide).abs().max())
    return difference / largest if largest else (0.0 if difference == 0 else torch.inf)


def _tolerance(outputs: Tensor) -> float:
    if not outputs.is_floating_point():
        return 0.0
    return max(_TOLERANCE, 8 * torch.finfo(outputs.dtype).eps)


@contextmanager
def torch_messages_ignored() -> Iterator[None]:
    """Ignore what torch's export prints, logs and warns about its own code. This is not safe in threads."""
    loggers = [logging.getLogger(name) for name in _TORCH_LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            for message, category in _TORCH_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message.

    Args:
        error: The error.

    Returns:
        For instance "RuntimeError: no kernel".
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
