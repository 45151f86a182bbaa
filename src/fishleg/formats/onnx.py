"""ONNX files: written by `torch.onnx`, run by ONNX Runtime. They need the extra `onnx`."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg.formats.traced import TracedModel, first_line, torch_messages_ignored

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_MOST_BYTES = 2**31 - 1  # of a file without external data


def missing_packages(needed: tuple[str, ...] = PACKAGES) -> list[str]:
    """Return the packages that are not installed.

    Args:
        needed: The packages to look for; default: all that an export needs.

    Returns:
        Their names.
    """
    return [name for name in needed if find_spec(name) is None]


def to_onnx(traced: TracedModel) -> tuple[bytes, float]:
    """Return the ONNX file of a traced model, run by ONNX Runtime and compared with the model.

    Args:
        traced: The traced model.

    Returns:
        The bytes of the file, and the largest relative difference that was found.

    Raises:
        ValueError: If the model cannot be written as ONNX, or computes something else then.
    """
    names = traced.call.names
    try:
        with torch_messages_ignored():
            made = torch.onnx.export(
                traced.program, dynamo=True, input_names=names, output_names=["output"], verbose=False
            )
        assert made is not None
        proto = made.model_proto
        _tidy(proto)
    except Exception as error:
        raise ValueError(f"the model cannot be written as ONNX: {first_line(error)}") from error
    if proto.ByteSize() > _MOST_BYTES:
        raise ValueError(
            f"the ONNX model would have {proto.ByteSize():,} bytes: one file can hold {_MOST_BYTES:,} at most"
        )
    data: bytes = proto.SerializeToString()
    difference = traced.verify(OnnxModel(data).run, "the ONNX model")
    return data, difference


def _tidy(proto: Any) -> None:
    """Remove the traces of this machine, and name the dynamic dimension "batch"."""
    del proto.metadata_props[:]
    parts = [proto.graph, *proto.functions]
    for part in parts:
        del part.metadata_props[:]
        for node in part.node:
            del node.metadata_props[:]
            node.doc_string = ""
    values = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
    dimensions = [d for v in values for d in v.type.tensor_type.shape.dim if d.dim_param]
    symbols = {d.dim_param for v in proto.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param}
    if len(symbols) == 1:
        (symbol,) = symbols
        for dimension in dimensions:
            dimension.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", "batch", dimension.dim_param)
    for value in values:
        del value.metadata_props[:]


class OnnxModel:
    """An ONNX model in ONNX Runtime, on the CPU.

    Args:
        source: The file, or its bytes.
        threads: The number of threads; default: that of torch.

    Attributes:
        inputs: The names of its inputs.

    Raises:
        ValueError: If ONNX Runtime cannot load the model.
    """

    def __init__(self, source: bytes | Path, threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3  # errors only; they are raised, too
        name = "the ONNX model" if isinstance(source, bytes) else str(source)
        try:
            self._session = onnxruntime.InferenceSession(
                source if isinstance(source, bytes) else str(source),
                options,
                providers=["CPUExecutionProvider"],
            )
        except Exception as error:
            hint = ""
            if "NOT_IMPLEMENTED" in str(error):
                hint = ". It lacks many operations in other dtypes than float32: export model.float()"
            raise ValueError(f"ONNX Runtime cannot load {name}: {first_line(error)}{hint}") from error
        self.inputs = [value.name for value in self._session.get_inputs()]

    def run(self, tensors: list[Tensor]) -> Tensor:
        """Run the model.

        Args:
            tensors: Its inputs, in their order.

        Returns:
            Its first output.
        """
        feed = {name: t.detach().cpu().numpy() for name, t in zip(self.inputs, tensors, strict=True)}
        return torch.from_numpy(self._session.run(None, feed)[0])
