"""Every public callable says what it takes, returns and raises."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ROOMS = (
    "options", "runtime", "report", "curvature", "formats", "shrinking", "workloads", "inverse", "optim",
    "pruning", "runs", "cli",
)  # fmt: skip


def public_functions(room: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Names, functions and the docstrings that must describe their arguments, of all that a room exports."""
    module = importlib.import_module(f"fishleg.{room}")
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield name, value, inspect.getdoc(value) or ""
        elif inspect.isclass(value) and not issubclass(value, BaseException):
            if not (dataclasses.is_dataclass(value) and room == "options"):  # options carry their own help
                yield name, value, "\n".join(inspect.getdoc(base) or "" for base in value.__mro__[:-1])
            for attribute, member in vars(value).items():
                function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                inherited = any(attribute in vars(base) for base in value.__mro__[1:])
                if inspect.isfunction(function) and not attribute.startswith("_") and not inherited:
                    yield f"{name}.{attribute}", function, inspect.getdoc(function) or ""


def complaints(function: Callable[..., Any], doc: str) -> Iterator[str]:
    if not doc:
        yield "has no docstring"
    signature = inspect.signature(function)
    for name in signature.parameters:
        if name not in ("self", "cls") and not re.search(rf"^\s*\*{{0,2}}{name}( \(.*\))?:", doc, re.M):
            yield f"does not describe {name}"
    result = str(signature.return_annotation)
    silent = inspect.isclass(function) or result in ("None", "Iterator[None]")
    if not silent and not re.search(r"^(Returns|Yields):|^(Return|Tell) ", doc, re.M):
        yield "does not say what it returns"


@pytest.mark.parametrize("room", ROOMS)
def test_public_callables_are_documented(room: str) -> None:
    found = [
        f"{room}: {name} {complaint}"
        for name, function, doc in public_functions(room)
        for complaint in complaints(function, doc)
    ]
    assert found == []


def test_the_check_itself() -> None:
    def half(a: int, b: int) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a + b

    assert list(complaints(half, inspect.getdoc(half) or "")) == [
        "does not describe b",
        "does not say what it returns",
    ]
