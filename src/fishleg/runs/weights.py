"""Read state dicts from files, without unpickling code, and load them into models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.runs.sources import SourceError
from fishleg.shrinking.shrink import load_shrunk

SHRUNK = "fishleg_shrunk"  # a key in a file's header: the state dict is that of a shrunk model


class _ShrunkState(dict[str, Tensor]):
    """The state dict of a model that was cut down to its kept rows."""


def load_weights(path: str | Path, base: Path | None = None) -> dict[str, Tensor]:
    """Read a state dict from a .safetensors file (plain, packed or shrunk) or a torch file.

    Args:
        path: The file.
        base: The directory that a relative path refers to; default: the current one.

    Returns:
        The state dict.

    Raises:
        SourceError: The file is missing, cannot be read, or holds no state dict.
    """
    path = (base or Path.cwd()) / path
    if not path.is_file():
        problem = f"{path} is a directory, not a file" if path.is_dir() else f"there is no file {path}"
        raise SourceError(f"weights: {problem}")
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open
            from safetensors.torch import load_file

            from fishleg.formats.packed import unpack

            state: Any = unpack(load_file(path))
            with safe_open(path, framework="pt") as file:
                if SHRUNK in (file.metadata() or {}):
                    return _ShrunkState(state)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if path.suffix != ".safetensors" and not isinstance(error, (OSError, RuntimeError)):
            # torch's own message recommends to unpickle the file, which may run any code
            reason = "it is not a torch file, or it has pickled objects other than tensors"
        raise SourceError(
            f"weights: {path} cannot be read as a state dict ({reason}). "
            "Save torch.save(model.state_dict(), ...) or safetensors, not the whole model"
        ) from None
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state:
        found = "an empty one" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise SourceError(f"weights: {path} holds no state dict of tensors, but {found}")
    wrong = next((n for n, v in state.items() if not isinstance(n, str) or not torch.is_tensor(v)), None)
    if wrong is not None:
        raise SourceError(
            f"weights: {path} holds no state dict of tensors: {wrong!r} is a {type(state[wrong]).__name__}"
        )
    if all(name.startswith("module.") for name in state):  # from DistributedDataParallel
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return dict(state)


def apply_weights(model: nn.Module, state: dict[str, Tensor], where: str | Path) -> None:
    """Load a state dict into a model. For that of a shrunk model, the model is shrunk first.

    Args:
        model: The model; it is changed in place.
        state: What `load_weights` returned.
        where: The file, for error messages.

    Raises:
        SourceError: The state dict does not fit the model, or it has NaN or infinite values.
    """
    if isinstance(state, _ShrunkState):
        try:
            load_shrunk(model, state)
        except (ValueError, RuntimeError) as error:
            raise SourceError(f"weights: {where} does not fit the model: {error}") from error
        return
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own]
    wrong = [
        f"{name} is {list(state[name].shape)}, the model has {list(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    problems = [f"missing {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"] if missing else []
    problems += [f"unknown {', '.join(extra[:3])}{' ...' if len(extra) > 3 else ''}"] if extra else []
    problems += wrong[:3]
    if problems:
        raise SourceError(f"weights: {where} does not fit the model: {'; '.join(problems)}")
    bad = [
        name
        for name, value in state.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    if bad:
        raise SourceError(f"weights: {where} holds NaN or Inf in {', '.join(bad[:3])}")
    model.load_state_dict(state)
