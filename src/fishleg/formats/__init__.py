"""File formats: checkpoints (`checkpoint`), packed files of sparse models (`packed`), and TOML (`toml`).

How files are written and read at all is in `files`, and safetensors files are in `tensor_files`.

The exported names are imported on first use, because the recipes of the command line need TOML but not torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fishleg.formats.checkpoint import CheckpointError, Store
    from fishleg.formats.files import write_atomically, write_json
    from fishleg.formats.packed import pack, unpack
    from fishleg.formats.toml import read_toml

_MODULES = {
    "CheckpointError": "checkpoint",
    "Store": "checkpoint",
    "pack": "packed",
    "read_toml": "toml",
    "unpack": "packed",
    "write_atomically": "files",
    "write_json": "files",
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
    "unpack",
    "write_atomically",
    "write_json",
]
