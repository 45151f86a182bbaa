"""Batches of a DataLoader: their inputs, targets and size, and the call of the model on them.

A batch may be a tensor, `(inputs, targets)`, `(inputs,)`, or a mapping of keyword arguments. Every other
format needs a user-defined `forward(model, batch) -> outputs`. Targets only mark ignored positions here: the
true Fisher matrix does not use their values. Targets whose shape does not fit the outputs are not used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Tensor]
_IGNORED = -100  # the default ignore_index of torch's losses and of the language-model libraries
_TARGET_KEYS = ("labels", "label", "targets", "target")


def default_forward(model: nn.Module, batch: Any) -> Tensor:
    """Call the model on the inputs of a batch.

    Args:
        model: The model to call.
        batch: A tensor, `(inputs, targets)`, `(inputs,)`, or a mapping of keyword arguments.

    Returns:
        The output tensor; if the model returns several tensors, the logits.

    Raises:
        TypeError: If the model's call fails, or its result holds no output tensor.
        ValueError: If the batch has an ambiguous format, or a key that the model does not accept.

    Example:
        >>> default_forward(nn.Linear(3, 2), (torch.zeros(5, 3), torch.zeros(5))).shape
        torch.Size([5, 2])
    """
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
            f"the model takes no argument {refused[1]!r}, but a batch has this key: all keys are passed as "
            f"arguments, except targets, which must be called {', '.join(_TARGET_KEYS[:-1])} or "
            f"{_TARGET_KEYS[-1]}; "
            "pass forward=lambda model, batch: ... to define how the model is called"
        ) from error
    return output_tensor(outputs)


def inputs_of(batch: Any) -> Any:
    """Return the part of a batch that goes into the model.

    Args:
        batch: A tensor, `(inputs, targets)`, `(inputs,)`, or a mapping of keyword arguments.

    Returns:
        The inputs: a tensor, or a dictionary of keyword arguments without the targets.

    Raises:
        ValueError: If the batch is an empty sequence, or has more than two parts.
    """
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in _TARGET_KEYS}
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise ValueError("a batch must hold at least the model's input, got an empty sequence")
        if len(batch) > 2:
            raise ValueError(
                f"a batch of {len(batch)} parts is ambiguous: expected (inputs, targets); "
                "pass forward=lambda model, batch: ... to define how the model is called"
            )
        return inputs_of(batch[0]) if isinstance(batch[0], Mapping) else batch[0]
    return batch


def targets_of(batch: Any) -> Tensor | None:
    """Return the targets of a batch.

    In a mapping the targets have one of the keys "labels", "label", "targets" or "target". Labels of a causal
    language model are shifted by one token, so that position i holds the label of output i.

    Args:
        batch: A tensor, `(inputs, targets)`, `(inputs,)`, or a mapping of keyword arguments.

    Returns:
        The targets, or None if the batch has none.
    """
    if isinstance(batch, Mapping):
        targets = next((batch[key] for key in _TARGET_KEYS if torch.is_tensor(batch.get(key))), None)
        return _shift_if_causal(targets, batch.get("input_ids"))
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and torch.is_tensor(batch[1]):
        return batch[1]
    return None


def _shift_if_causal(targets: Tensor | None, tokens: Any) -> Tensor | None:
    """Return the targets, shifted by one position if they repeat the tokens.

    Targets that equal the tokens belong to a causal language model, whose output i predicts token i + 1.
    Such a model shifts the labels inside its own loss, which is not used here.
    """
    if targets is None or not torch.is_tensor(tokens) or targets.shape != tokens.shape or tokens.dim() < 2:
        return targets
    counted = targets != _IGNORED
    if not bool(counted.any()) or not torch.equal(targets[counted], tokens[counted]):
        return targets
    last = torch.full_like(targets[..., :1], _IGNORED)
    return torch.cat([targets[..., 1:], last], dim=-1)


def output_tensor(outputs: Any) -> Tensor:
    """Return the output tensor in the value that a model returned.

    Args:
        outputs: A tensor, a mapping or object with `logits`, or a sequence whose first item is a tensor.

    Returns:
        The tensor itself, the logits, or the first item of the sequence.

    Raises:
        TypeError: If `outputs` holds no such tensor.
    """
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
        "pass forward=lambda model, batch: ... to select the output tensor"
    )


def batch_size(batch: Any) -> int:
    """Return the number of examples in a batch.

    This is the length of the targets or, without targets, of the inputs. If the tensors have different
    lengths, a length that is also a later dimension of another tensor is taken for a sequence length, as in
    `{"mask": [time, time], "x": [batch, time, features]}`. Of the remaining lengths the most frequent one is
    used, and among equally frequent ones the first.

    Args:
        batch: A batch of any format.

    Returns:
        The number of examples, at least 1.

    Raises:
        ValueError: If the batch has no tensor with a batch dimension, or is empty.

    Example:
        >>> batch_size((torch.zeros(5, 3), torch.zeros(5)))
        5
    """
    distinct = {id(tensor): tensor for tensor in _all_tensors(batch)}  # a repeated tensor counts once
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
        is_inner = {n: any(n in t.shape[1:] for t in tensors if len(t) != n) for n in counts}
        size = min(counts, key=lambda n: (n == 0, is_inner[n], -counts[n]))
    if size == 0:
        empty = next(tensor for tensor in tensors if len(tensor) == 0)
        raise ValueError(f"a batch must not be empty, got a tensor of shape {tuple(empty.shape)}")
    return size


def has_ambiguous_size(batch: Any) -> bool:
    """Tell whether the first dimensions of a batch may not be its number of examples.

    This holds if the tensors have different lengths. It also holds for a sequence of more than two parts,
    which may be several inputs or several examples. In these cases the outputs of the model must be checked
    with `check_parts`.

    Args:
        batch: A batch of any format.

    Returns:
        True if `batch_size` had to guess.
    """
    many_parts = isinstance(batch, (tuple, list)) and len(batch) > 2
    return many_parts or len({len(tensor) for tensor in _all_tensors(batch) if tensor.dim() > 0}) > 1


def check_parts(batch: Any, whole: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
    """Check that the outputs of the parts of a batch make up the outputs of the whole batch.

    The sizes of the parts must add up along one dimension. This need not be the first dimension, and need
    not have the length of the batch: outputs may have time first, or be the concatenated tokens.

    Args:
        batch: The batch that was split.
        whole: The shape of the outputs of the whole batch.
        parts: The shapes of the outputs of its parts.

    Raises:
        ValueError: If the shapes do not add up along any dimension.
    """
    same_rank = [len(part) == len(whole) for part in parts]
    if all(same_rank) and any(sum(part[d] for part in parts) == n for d, n in enumerate(whole)):
        return
    shapes = sorted({tuple(tensor.shape) for tensor in _all_tensors(batch)})
    inputs, made = ", ".join(map(str, shapes[:4])), ", ".join(str(tuple(part)) for part in parts[:4])
    raise ValueError(
        f"a batch of tensors {inputs} was taken for {batch_size(batch)} examples and split into "
        f"{len(parts)} parts, but the output shapes of the parts, {made}, do not add up to that of the whole "
        f"batch, {tuple(whole)}: examples must be the first dimension of the inputs (stack lists of examples "
        "in the loader; batch_first=True for recurrent networks)"
    )


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return the examples `start` to `stop` (exclusive) of a batch.

    Every tensor whose length is the batch size is sliced; all other values are kept. A list or tuple of that
    length is sliced as well if it holds no tensors, for example a list of texts.

    Args:
        batch: A batch of any format.
        start: The first example.
        stop: One after the last example.

    Returns:
        A batch of the same format.

    Raises:
        ValueError: If the inputs and the targets have different lengths, so that the batch cannot be split.

    Example:
        >>> inputs, targets = slice_batch((torch.zeros(5, 3), torch.arange(5)), 1, 3)
        >>> inputs.shape, targets
        (torch.Size([2, 3]), tensor([1, 2]))
    """
    size, targets = batch_size(batch), targets_of(batch)
    if targets is not None and targets.dim() > 0 and len(targets) != size and (start, stop) != (0, size):
        raise ValueError(
            f"the inputs of a batch have length {size} and its targets {len(targets)}: examples must be the "
            "first dimension of both (batch_first=True for recurrent networks)"
        )

    return _map_examples(batch, size, lambda value: value[start:stop])


def resize_batch(batch: Any, size: int) -> Any:
    """Return a batch of another size: the first examples of it, repeated from the start if there are too few.

    Args:
        batch: A batch of any format.
        size: The number of examples, at least 1.

    Returns:
        A batch of the same format. What `slice_batch` would keep is kept.

    Example:
        >>> resize_batch((torch.zeros(2, 3), torch.tensor([7, 8])), 3)[1]
        tensor([7, 8, 7])
    """
    present = batch_size(batch)
    chosen = [index % present for index in range(size)]

    def choose(value: Any) -> Any:
        return value[chosen] if isinstance(value, Tensor) else type(value)(value[index] for index in chosen)

    return _map_examples(batch, present, choose)


def _map_examples(value: Any, size: int, choose: Callable[[Any], Any]) -> Any:
    """Choose examples of a batch: of its tensors and its lists without tensors, if they have its length.

    Returns:
        A batch of the same format.
    """
    if isinstance(value, Tensor):
        return choose(value) if value.dim() > 0 and len(value) == size else value
    if isinstance(value, Mapping):
        return {key: _map_examples(item, size, choose) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_examples(item, size, choose) for item in value))
    if isinstance(value, (tuple, list)):
        if len(value) == size and not _all_tensors(value):
            return choose(value)
        return type(value)(_map_examples(item, size, choose) for item in value)
    return value


def move_batch(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to a device.

    Args:
        batch: A batch of any format.
        device: The target device.

    Returns:
        A batch of the same format.
    """
    return map_tensors(batch, lambda t: t.to(device))


def map_tensors(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor inside nested mappings, tuples and lists.

    Args:
        value: A tensor, a nested container of tensors, or any other value.
        f: The function to apply.

    Returns:
        The same structure with the results; values that are not tensors are kept.
    """
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, f) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, f) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, f) for item in value)
    return value


def _all_tensors(value: Any) -> list[Tensor]:
    """Return all tensors inside nested mappings, tuples and lists."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, collect)
    return found
