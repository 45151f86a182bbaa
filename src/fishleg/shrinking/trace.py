"""Tracing a model with `torch.export` to find its channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fishleg.runtime.batches import Forward, default_forward, inputs_of, map_tensors
from fishleg.shrinking.channel_graph import ChannelGraph


def all_outputs(model: nn.Module, batch: Any, forward: Forward) -> list[Tensor]:
    """Return all tensors that a model returns for a batch.

    Args:
        model: The model.
        batch: A batch of any format.
        forward: `forward(model, batch) -> outputs`. A user-defined function may return only some outputs.

    Returns:
        The tensors; not only the logits, as `default_forward` would.
    """
    if forward is not default_forward:
        outputs: Any = forward(model, batch)
    else:
        inputs = inputs_of(batch)
        outputs = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


class _ModelCall(nn.Module):
    """The call of a model on a batch as a module, which `torch.export` requires."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._forward_function = model, forward

    def forward(self, batch: Any) -> list[Tensor]:
        return all_outputs(self.model, batch, self._forward_function)


def trace_channels(model: nn.Module, batch: Any, forward: Forward) -> tuple[ChannelGraph, list[str]]:
    """Trace a model and find its channels.

    Args:
        model: The model, in evaluation mode.
        batch: A batch of any format, on the model's device.
        forward: `forward(model, batch) -> outputs`.

    Returns:
        The channels, and the names of the parameters that the outputs do not use.

    Raises:
        ValueError: If `torch.export` cannot trace the model.
    """
    try:
        with torch.no_grad():
            program = torch.export.export(
                _ModelCall(model, forward), (map_tensors(batch, Tensor.clone),), strict=False
            )
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            "torch.export cannot trace the model, which is necessary to find the rows that can be cut out: "
            f"{type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {node: name.removeprefix("model.") for node, name in names.items()}
    used = {names[node.name] for node in program.graph.nodes if node.name in names and node.users}
    used_ids = {id(parameter_or_buffer(model, name)) for name in used}
    unused = [name for name, p in model.named_parameters() if id(p) not in used_ids]
    tensors = {name: parameter_or_buffer(model, name).detach().cpu() for name in names.values()}
    not_saved = tensors.keys() - model.state_dict().keys()  # a state dict could not restore their new shapes
    return ChannelGraph(program.graph, names, tensors, not_saved), unused


def parameter_or_buffer(model: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by name, also one that is not part of the state dict.

    Args:
        model: The model.
        name: The name.

    Returns:
        The tensor.
    """
    path, _, attribute = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), attribute)
    return found
