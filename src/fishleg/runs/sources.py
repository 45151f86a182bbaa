"""Build the model and the data that a recipe names: functions of the user, or a built-in workload.

No code is called except the functions that the user names.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from fishleg.options.declaration import nearest
from fishleg.runs.errors import ToolError
from fishleg.runtime.batch_errors import error_text
from fishleg.workloads.registry import WORKLOADS, Workload

_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


class SourceError(ToolError):
    """A model, a loader or a file that the user named cannot be found, read or used."""


@dataclass(frozen=True)
class Data:
    """The loaders of a run.

    Args:
        calibration: Batches for Q; inputs suffice.
        train: Batches to train on; default: the calibration batches.
        evaluation: Batches to evaluate on; default: the calibration batches.
    """

    calibration: Iterable[Any]
    train: Iterable[Any] | None = None
    evaluation: Iterable[Any] | None = None


def find_function(spec: str, what: str, base: Path | None = None) -> Callable[..., Any]:
    """Return the function that a text such as `file.py:name` or `package.module:name` names.

    Args:
        spec: The text.
        what: The option that it comes from, for error messages.
        base: The directory that relative paths refer to; default: the current one.

    Returns:
        The function.

    Raises:
        SourceError: The text is malformed, importing fails, or there is no such function.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise SourceError(f"{what} must be file.py:function or package.module:function, got {spec!r}")
    base = base or Path.cwd()
    module = _from_file(base / place, what) if place.endswith(".py") else _from_module(place, what, base)
    if not hasattr(module, name):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise SourceError(f"{what}: {place} has no {name!r}{nearest(name, known)}")
    found = getattr(module, name)
    if not callable(found):
        raise SourceError(f"{what}: {spec} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def untrusted_code(specs: Mapping[str, str | None], base: Path) -> str | None:
    """Find code that a recipe names and that is neither below the current directory nor installed.

    Nothing is imported.

    Args:
        specs: By option, the functions that a recipe names, such as `net.py:make`; None: none is named.
        base: The directory that relative paths refer to.

    Returns:
        The first such option with its file; None if there is none.
    """
    here = Path.cwd().resolve()
    for option, spec in specs.items():
        place = (spec or "").rpartition(":")[0]
        if not place or (place == "workload" and option == "model"):
            continue
        if place.endswith(".py"):
            parts = [base / place]
        else:
            found = PathFinder.find_spec(place.split(".")[0], [str(base)])
            if found is None:  # it comes from Python's own search path, which is the user's
                continue
            parts = [*_files_of_module(place, base), Path(found.origin or base)]
        for part in (part.resolve() for part in parts if os.path.lexists(part)):  # where links lead to
            if not any(folder in (part, *part.parents) for folder in (here, *_LIBRARIES)):
                return f"{option} = {spec!r}, which is {part}"
    return None


def _files_of_module(place: str, base: Path) -> list[Path]:
    """Return where the packages of a dotted name and the module itself may be below a directory."""
    found: list[Path] = []
    folder = base
    for name in place.split("."):
        found += [folder / f"{name}.py", folder / name, folder / name / "__init__.py"]
        folder = folder / name
    return found


def _from_file(path: Path, what: str) -> Any:
    if not path.is_file():
        raise SourceError(f"{what}: there is no file {path}")
    name = f"_fishleg_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # so that the file can import files beside it
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"` may exit
        del sys.modules[name]
        raise SourceError(f"{what}: importing {path} raised {describe_error(error)}") from error
    return module


def _from_module(place: str, what: str, base: Path) -> Any:
    # only where the module is: other files in the directory must not take the place of installed modules
    if str(base) not in sys.path and PathFinder.find_spec(place.split(".")[0], [str(base)]) is not None:
        sys.path.insert(0, str(base))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        own = error.name is not None and place.split(".")[0] == error.name.split(".")[0]
        hint = f" (for a file, write {place}.py:...)" if own else f" (imported by {place})"
        raise SourceError(f"{what}: there is no module {error.name!r}{hint}") from error
    except (Exception, SystemExit) as error:
        raise SourceError(f"{what}: importing {place} raised {describe_error(error)}") from error


def _call(spec: str, what: str, base: Path | None) -> Any:
    """Return the result of the named function.

    Raises:
        SourceError: The function cannot be found, or it raises an error; the message names the line.
    """
    function = find_function(spec, what, base)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise SourceError(f"{what}: {spec} raised {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the type and message of an error in the user's code, and the line that it came from.

    Args:
        error: The error.

    Returns:
        For instance "KeyError: 'x' (data.py, line 3)".
    """
    own = Path(__file__).parents[1]  # fishleg itself
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    frames = [f for f in frames if own not in Path(f.filename).parents]
    theirs = [f for f in frames if not any(path in Path(f.filename).parents for path in _LIBRARIES)] or frames
    place = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error_text(error)}{place}"


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Turn an exit of the user's code inside the `with` block into an error: it must not look like success.

    Yields:
        Nothing.

    Raises:
        SourceError: The code has called `sys.exit`, or raised what is no Exception.
        KeyboardInterrupt: The user has ended the process.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, GeneratorExit, or one of the user's own
        raise SourceError(f"the work was ended by {describe_error(error)}") from error


def _find_workload(spec: str) -> Workload | None:
    """Return the built-in workload of `workload:NAME`, or None for another text.

    Raises:
        SourceError: There is no workload of this name.
    """
    prefix, _, name = spec.partition(":")
    if prefix != "workload":
        return None
    if name not in WORKLOADS:
        raise SourceError(
            f"unknown workload {name!r} (there are {', '.join(WORKLOADS)}){nearest(name, WORKLOADS)}"
        )
    return WORKLOADS[name]


def make_model(spec: str, base: Path | None = None, *, trained: bool = True) -> nn.Module:
    """Return the model that a text names.

    Args:
        spec: A function such as `net.py:make`, or `workload:NAME`.
        base: The directory that relative paths refer to; default: the current one.
        trained: Whether the model of a workload is trained; without effect on other models.

    Returns:
        The model.

    Raises:
        SourceError: There is no such function, it raises an error, or it does not return a module.
    """
    workload = _find_workload(spec)
    if workload is not None:
        return workload.model(trained)
    model = _call(spec, "model", base)
    if not isinstance(model, nn.Module):
        raise SourceError(f"model: {spec} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def make_data(
    model_spec: str,
    data: str | None,
    train: str | None,
    evaluation: str | None,
    base: Path | None = None,
    *,
    calibrated: bool = True,
) -> Data:
    """Return the loaders of a run.

    Args:
        model_spec: The model. If it is a workload, its own loaders replace those that are not named.
        data: The function that returns the calibration loader, such as `data.py:loader`.
        train: The function that returns the training loader.
        evaluation: The function that returns the evaluation loader.
        base: The directory that relative paths refer to; default: the current one.
        calibrated: Whether calibration data are needed; to evaluate a model, they are not.

    Returns:
        The loaders.

    Raises:
        SourceError: Data are missing, or a function does not return a loader.
    """
    workload = _find_workload(model_spec)
    if data is None:
        if workload is None and evaluation is not None and not calibrated:
            main = _loader(evaluation, "eval_data", base)
            return Data(main, None, main)
        if workload is None:
            key, flag = (
                ("data", "--data data.py:loader") if calibrated else ("eval_data", "--eval-data data.py:test")
            )
            raise SourceError(f"{key} is missing: name the function that returns a loader, e.g. {flag}")
        calibration, training, test = workload.data()
        return Data(
            calibration, training, test if evaluation is None else _loader(evaluation, "eval_data", base)
        )
    main = _loader(data, "data", base)
    return Data(
        main,
        None if train is None else _loader(train, "train_data", base),
        None if evaluation is None else _loader(evaluation, "eval_data", base),
    )


def _loader(spec: str, what: str, base: Path | None) -> Iterable[Any]:
    loader = _call(spec, what, base)
    if not hasattr(loader, "__iter__"):
        raise SourceError(
            f"{what}: {spec} must return a DataLoader or another iterable, got {type(loader).__name__}"
        )
    # a DataLoader with persistent workers returns the same iterator each time, but resets it
    if not isinstance(loader, DataLoader) and _iterator(loader, spec, what) is _iterator(loader, spec, what):
        raise SourceError(
            f"{what}: {spec} returned an iterator, which can be read once only; return the DataLoader"
        )
    return loader  # type: ignore[no-any-return]


def _iterator(loader: Iterable[Any], spec: str, what: str) -> Any:
    try:
        return iter(loader)
    except Exception as error:
        raise SourceError(
            f"{what}: iterating over what {spec} returned raised {describe_error(error)}"
        ) from error
