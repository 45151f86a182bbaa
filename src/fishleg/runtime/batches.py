"""How a batch from the user's DataLoader becomes a call of the user's model.

A batch may be a tensor, (inputs, targets), (inputs,), or a mapping of keyword arguments. Anything else
works through a `forward(model, batch) -> outputs` of your own. Targets are used to find ignored positions;
the true Fisher never reads them, and what does not fit the outputs is not taken for targets.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Tensor]
_IGNORED = -100  # the label that is left out of a loss, in torch as in the libraries of language models
_TARGET_KEYS = ("labels", "label", "targets", "target")


def default_forward(model: nn.Module, batch: Any) -> Tensor:
    """Call the model on the inputs of a batch; its output tensor (the logits where there are several)."""
    inputs = inputs_of(batch)
    if not isinstance(inputs, Mapping):
        return output_tensor(model(inputs))
    try:
        outputs = model(**inputs)
    except TypeError as error:
        refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if refused is None or refused[1] not in inputs:
            raise
        raise ValueError(
            f"the model takes no argument {refused[1]!r}, which a batch has: all keys are arguments, except "
            f"for targets, which must be called {', '.join(_TARGET_KEYS[:-1])} or {_TARGET_KEYS[-1]}; "
            "pass forward=lambda model, batch: ... to say how the model is called"
        ) from error
    return output_tensor(outputs)


def inputs_of(batch: Any) -> Any:
    """The part of a batch that goes into the model."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in _TARGET_KEYS}
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise ValueError("a batch must hold at least the model's input, got an empty sequence")
        if len(batch) > 2:
            raise ValueError(
                f"a batch of {len(batch)} parts is ambiguous: expected (inputs, targets); "
                "pass forward=lambda model, batch: ... to say how the model is called"
            )
        return inputs_of(batch[0]) if isinstance(batch[0], Mapping) else batch[0]
    return batch


def targets_of(batch: Any) -> Tensor | None:
    """The targets of a batch, or None where it has none."""
    if isinstance(batch, Mapping):
        targets = next((batch[key] for key in _TARGET_KEYS if torch.is_tensor(batch.get(key))), None)
        return _next_tokens(targets, batch.get("input_ids"))
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and torch.is_tensor(batch[1]):
        return batch[1]
    return None


def _next_tokens(targets: Tensor | None, tokens: Any) -> Tensor | None:
    """Labels that repeat the tokens are a causal language model's: position i is to predict token i + 1.

    Such models shift the labels themselves when they compute their loss; here it has to be done for them.
    """
    if targets is None or not torch.is_tensor(tokens) or targets.shape != tokens.shape or tokens.dim() < 2:
        return targets
    counts = targets != _IGNORED
    if not bool(counts.any()) or not torch.equal(targets[counts], tokens[counts]):
        return targets
    last = torch.full_like(targets[..., :1], _IGNORED)
    return torch.cat([targets[..., 1:], last], dim=-1)


def output_tensor(outputs: Any) -> Tensor:
    """The tensor of interest in whatever a model returned."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and torch.is_tensor(outputs.get("logits")):
        return output_tensor(outputs["logits"])
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise TypeError(
        f"the model returned {type(outputs).__name__}, which holds no output tensor or `logits`; "
        "pass forward=lambda model, batch: ... to say which tensor is the output"
    )


def batch_size(batch: Any) -> int:
    """How many examples a batch has: the length of its targets, or else of its inputs.

    Where tensors differ in length, a length that is also a later dimension of another tensor is taken for
    that of a sequence, as in {"mask": [time, time], "x": [batch, time, features]}; of the others the most
    frequent counts, and then the first.
    """
    distinct = {id(tensor): tensor for tensor in _tensors(batch)}  # one that is there twice counts once
    tensors = [tensor for tensor in distinct.values() if tensor.dim() > 0]
    if not tensors:
        raise ValueError(
            f"a batch must hold at least one tensor with a batch dimension, got {type(batch).__name__}"
        )
    counts = Counter(map(len, tensors))  # in the order of their first appearance
    targets = targets_of(batch)
    if targets is not None and targets.dim() > 0 and counts[len(targets)] > 1:
        size = len(targets)
    else:
        inner = {n: any(n in t.shape[1:] for t in tensors if len(t) != n) for n in counts}
        size = min(counts, key=lambda n: (n == 0, inner[n], -counts[n]))
    if size == 0:
        empty = next(tensor for tensor in tensors if len(tensor) == 0)
        raise ValueError(f"a batch must not be empty, got a tensor of shape {tuple(empty.shape)}")
    return size


def is_ambiguous(batch: Any) -> bool:
    """Whether the lengths of a batch's tensors may be something else than its number of examples.

    Several tensors in a list are as many inputs, or as many examples; only the outputs tell.
    """
    parts = isinstance(batch, (tuple, list)) and len(batch) > 2
    return parts or len({len(tensor) for tensor in _tensors(batch) if tensor.dim() > 0}) > 1


def check_parts(batch: Any, whole: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
    """An error where the outputs of a batch's parts do not make up those of the batch; all are shapes.

    They must add up along some dimension, which need not be the first, nor as long as the batch: outputs may
    have time first, or be tokens in a row.
    """
    fits = [len(part) == len(whole) for part in parts]
    if all(fits) and any(sum(part[d] for part in parts) == n for d, n in enumerate(whole)):
        return
    shapes = sorted({tuple(tensor.shape) for tensor in _tensors(batch)})
    inputs, made = ", ".join(map(str, shapes[:4])), ", ".join(str(tuple(part)) for part in parts[:4])
    raise ValueError(
        f"a batch of tensors {inputs} was taken for {batch_size(batch)} examples and cut in {len(parts)}, "
        f"but the outputs of the parts, {made}, do not make up those of the whole, {tuple(whole)}: examples "
        "must be the first dimension of the inputs (stack lists of examples in the loader; batch_first=True "
        "for recurrent networks)"
    )


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Examples start..stop of a batch: every tensor of the batch's length is cut, the rest is kept.

    Lists of that length are cut as well where they hold something else than tensors, texts say.
    """
    size, targets = batch_size(batch), targets_of(batch)
    if targets is not None and targets.dim() > 0 and len(targets) != size and (start, stop) != (0, size):
        raise ValueError(
            f"the inputs of a batch have the length {size} and its targets {len(targets)}: the examples "
            "must come first in both (batch_first=True for recurrent networks)"
        )

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[start:stop] if value.dim() > 0 and len(value) == size else value
        if isinstance(value, Mapping):
            return {key: cut(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(cut(item) for item in value))
        if isinstance(value, (tuple, list)):
            return (
                value[start:stop]
                if len(value) == size and not _tensors(value)
                else type(value)(map(cut, value))
            )
        return value

    return cut(batch)


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the given device."""
    return map_tensors(batch, lambda t: t.to(device))


def map_tensors(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """f applied to every tensor inside nested mappings, tuples and lists."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, f) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, f) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, f) for item in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, collect)
    return found
