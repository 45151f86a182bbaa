"""Read state dicts from files, without unpickling code, and load them into models."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from fishleg.formats.files import check_regular
from fishleg.formats.packed import unpack
from fishleg.formats.tensor_files import check_growth, read_tensors
from fishleg.options.text import printable
from fishleg.runs.sources import SourceError
from fishleg.runtime.tensors import NOT_FINITE, loading_problem
from fishleg.shrinking.shrink import load_shrunk

_PICKLES_OF_OLD_FILES = 5
SHRUNK = "fishleg_shrunk"  # a key in a file's header: the state dict is that of a shrunk model


class WeightsError(SourceError):
    """A file of weights cannot be read or used. Its message has one line, whatever the names in the file.

    Args:
        message: The message.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, one_line=True))


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
        WeightsError: The file is missing, cannot be read, or holds no state dict.
    """
    path = (base or Path.cwd()) / path
    if not path.exists() or path.is_dir():
        problem = f"{path} is a directory, not a file" if path.is_dir() else f"there is no file {path}"
        raise WeightsError(f"weights: {problem}")
    shrunk = False
    try:
        check_regular(path)
        if path.suffix == ".safetensors":
            tensors, metadata = read_tensors(path)
            state: Any = unpack(tensors)
            shrunk = SHRUNK in metadata
        else:
            _check_archive(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if path.suffix != ".safetensors" and not isinstance(error, (OSError, RuntimeError, _ArchiveError)):
            # torch's own message recommends to unpickle the file, which may run any code
            reason = "it is not a torch file, or it has pickled objects other than tensors"
        raise WeightsError(
            f"weights: {path} cannot be read as a state dict ({reason}). "
            "Save torch.save(model.state_dict(), ...) or safetensors, not the whole model"
        ) from None
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state:
        found = "an empty one" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise WeightsError(f"weights: {path} holds no state dict of tensors, but {found}")
    _check_tensors(state, path)
    state = _without_prefixes(state, path)
    return _ShrunkState(state) if shrunk else state


class _ArchiveError(ValueError):
    """A torch file has entries that torch does not write."""


def _check_archive(path: Path) -> None:
    """Check that a torch file does not grow when it is read: torch stores its entries uncompressed.

    Raises:
        _ArchiveError: An entry is compressed, or the entries are larger than the file.
    """
    if not zipfile.is_zipfile(path):  # of an old version of torch: several pickles, then raw values
        with open(path, "rb") as file:
            _check_pickles(file, _PICKLES_OF_OLD_FILES)
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    compressed = next((e for e in entries if e.compress_type != zipfile.ZIP_STORED), None)
    if compressed is not None:
        raise _ArchiveError(f"its entry {compressed.filename!r} is compressed, which torch does not do")
    unpacked, size = sum(max(e.file_size, e.compress_size) for e in entries), path.stat().st_size
    if unpacked > size:
        raise _ArchiveError(f"its entries claim {unpacked:,} bytes, the file has {size:,}")
    with zipfile.ZipFile(path) as archive:
        for entry in (e for e in entries if e.filename.endswith(".pkl")):
            with archive.open(entry) as file:
                _check_pickles(file, 1)


def _check_pickles(file: IO[bytes], count: int) -> None:
    """Check that pickles make no `bytearray`, which a few bytes can make as large as they like.

    torch allows it, and its own files have none. What is no pickle is left to torch, which refuses it.

    Raises:
        _ArchiveError: One does.
    """
    for _ in range(count):
        texts: list[str] = []
        try:
            for operation, argument, _ in pickletools.genops(file):
                if operation.name in ("GLOBAL", "INST"):
                    texts.append(str(argument).split(" ")[-1])
                elif operation.name in ("SHORT_BINUNICODE", "BINUNICODE", "UNICODE", "BINUNICODE8"):
                    texts.append(str(argument))
                elif operation.name in ("BYTEARRAY8",):
                    texts.append("bytearray")
        except Exception:  # not a pickle: torch says so
            pass
        if "bytearray" in texts:
            raise _ArchiveError("its pickle makes a bytearray, which a state dict does not hold")


def _check_tensors(state: dict[Any, Any], path: Path) -> None:
    """Check that a state dict holds plain tensors by name, not many times larger than the file.

    Raises:
        WeightsError: It does not.
    """
    for name, value in state.items():
        if not isinstance(name, str) or type(value) not in (Tensor, nn.Parameter):
            kind = type(value).__name__
        elif value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            kind = f"tensor of layout {value.layout}, dtype {value.dtype}, device {value.device}"
        else:
            continue
        raise WeightsError(f"weights: {path} holds no state dict of tensors: {name!r} is a {kind}")
    try:
        check_growth(state.values(), path)
    except ValueError as error:
        raise WeightsError(f"weights: {path} cannot be read as a state dict ({error})") from None


def _without_prefixes(state: Mapping[str, Tensor], where: str | Path) -> dict[str, Tensor]:
    """Return a state dict by the names that it has without DistributedDataParallel and torch.compile.

    Raises:
        WeightsError: Two names become the same.
    """
    names = dict(zip(state, _plain_names(state), strict=True))
    if len(set(names.values())) < len(names):
        plain = list(names.values())
        twice = next(name for name in plain if plain.count(name) > 1)
        raise WeightsError(f"weights: {where} holds {twice} twice, with and without a prefix")
    return {names[name]: value for name, value in state.items()}


def _plain_names(names: Iterable[str]) -> list[str]:
    """Return names without `_orig_mod` of torch.compile, and without `module.` if all begin so."""
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def apply_weights(model: nn.Module, state: dict[str, Tensor], where: str | Path) -> None:
    """Load a state dict into a model. For that of a shrunk model, the model is shrunk first.

    Args:
        model: The model; it is changed in place, unless an error is raised.
        state: What `load_weights` returned.
        where: The file, for error messages.

    Raises:
        WeightsError: The state dict does not fit the model, or it has NaN or infinite values, or values of
            another kind, such as integers for floating-point weights.
    """
    own = model.state_dict()
    own_names = dict(zip(_plain_names(own), own, strict=True))  # the model may be compiled itself
    fitted = {own_names.get(name, name): v for name, v in _without_prefixes(state, where).items()}
    if isinstance(state, _ShrunkState):
        try:
            load_shrunk(model, fitted)
        except (ValueError, RuntimeError) as error:
            raise WeightsError(f"weights: {where} does not fit the model: {error}") from error
        return
    missing = [name for name in own if name not in fitted]
    extra = [name for name in fitted if name not in own]
    wrong = [
        f"{name} is {list(fitted[name].shape)}, the model has {list(own[name].shape)}"
        for name in own
        if name in fitted and torch.is_tensor(own[name]) and fitted[name].shape != own[name].shape
    ]
    problems = [f"missing {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"] if missing else []
    problems += [f"unknown {', '.join(extra[:3])}{' ...' if len(extra) > 3 else ''}"] if extra else []
    problems += wrong[:3]
    if problems:
        raise WeightsError(f"weights: {where} does not fit the model: {'; '.join(problems)}")
    reasons = {name: loading_problem(value, own[name]) for name, value in fitted.items()}
    if bad := [name for name, reason in reasons.items() if reason == NOT_FINITE]:
        raise WeightsError(f"weights: {where} {NOT_FINITE} in {', '.join(bad[:3])}")
    if other := [f"{name} {reason}" for name, reason in reasons.items() if reason is not None]:
        raise WeightsError(f"weights: {where} does not fit the model: {'; '.join(other[:3])}")
    model.load_state_dict(fitted)
