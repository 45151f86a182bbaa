"""File formats: checkpoints, packed sparse models, exported models, TOML, and files that replace nothing.

How files are written and read is in `files`, safetensors files are in `tensor_files`, JSON in `results`.

The exported names are imported on first use, because the recipes of the command line need TOML but not torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fishleg.formats.checkpoint import CheckpointError, Store
    from fishleg.formats.files import write_atomically
    from fishleg.formats.packed import pack, unpack
    from fishleg.formats.results import to_json, write_json
    from fishleg.formats.toml import read_toml

_MODULES = {
    "CheckpointError": "checkpoint",
    "Store": "checkpoint",
    "pack": "packed",
    "read_toml": "toml",
    "to_json": "results",
    "unpack": "packed",
    "write_atomically": "files",
    "write_json": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fishleg.formats' has no attribute {name!r}")
    return getattr(import_module(f"fishleg.formats.{_MODULES[name]}"), name)


__all__ = [
    "CheckpointError",
    "Store",
    "pack",
    "read_toml",
    "to_json",
    "unpack",
    "write_atomically",
    "write_json",
]
