"""`fishleg doctor`: what is installed on this machine, what is missing, and how to install it."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from fishleg.runs.describe import environment

_ENOUGH_SPACE = 2**30  # bytes
_PACKAGES = {
    "safetensors": ("writes and reads sparse models", "pip install 'fishleg[cli]'"),
    "rich": ("live display of a run", "pip install 'fishleg[cli]'"),
    "matplotlib": ("pictures (compare, sensitivity --picture, demo)", "pip install 'fishleg[plot]'"),
    "onnx": ("fishleg export --to FILE.onnx", "pip install 'fishleg[onnx]'"),
    "onnxscript": ("fishleg export --to FILE.onnx", "pip install 'fishleg[onnx]'"),
    "onnxruntime": ("fishleg export --to FILE.onnx, fishleg bench --onnx", "pip install 'fishleg[onnx]'"),
    "yaml": ("recipes in YAML", "pip install pyyaml"),
    "tensorboard": ("the flag --tensorboard", "pip install tensorboard"),
    "wandb": ("the flag --wandb", "pip install wandb"),
}


def diagnose() -> list[dict[str, Any]]:
    """Examine this machine.

    Returns:
        For each item: its name ("what"), whether it is as needed ("ok"), its state ("is"), and what to do if
        it is not as needed ("hint").
    """
    found = [_item(name, True, value) for name, value in environment().items()]
    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    found.append(_item("devices", True, ", ".join(devices)))
    for package, (use, hint) in _PACKAGES.items():
        try:
            importlib.import_module(package)
            found.append(_item(package, True, f"installed: {use}"))
        except Exception as error:
            reason = "" if isinstance(error, ImportError) else f" ({type(error).__name__}: {error})"
            found.append(_item(package, False, f"missing{reason}: {use}", hint))
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    found.append(
        _item("disk", free > _ENOUGH_SPACE, f"{free / 2**30:.1f} GiB free here", "a run may need more space")
    )
    found.append(_item("directory", os.access(here, os.W_OK), str(here), "it is read-only: choose another"))
    return found


def _item(what: str, ok: bool, state: str, hint: str = "") -> dict[str, Any]:
    return {"what": what, "ok": ok, "is": state, "hint": "" if ok else hint}


def table(found: list[dict[str, Any]]) -> str:
    """Return a table for the terminal.

    Args:
        found: What `diagnose` returned.

    Returns:
        A line for each item.
    """
    width = max(len(entry["what"]) for entry in found)
    lines = []
    for entry in found:
        hint = f"   -> {entry['hint']}" if entry["hint"] else ""
        lines.append(f"{'ok ' if entry['ok'] else '-- '} {entry['what']:<{width}}  {entry['is']}{hint}")
    return "\n".join(lines)
