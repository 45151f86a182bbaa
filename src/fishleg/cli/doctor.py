"""What this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from fishleg.runs.describe import environment

_PACKAGES = {
    "safetensors": ("checkpoints and sparse files", "pip install 'fishleg[cli]'"),
    "rich": ("the live display", "pip install 'fishleg[cli]'"),
    "matplotlib": ("pictures (fishleg compare, sensitivity --picture, demo)", "pip install 'fishleg[plot]'"),
    "yaml": ("YAML recipes", "pip install pyyaml"),
    "tensorboard": ("--tensorboard", "pip install tensorboard"),
    "wandb": ("--wandb", "pip install wandb"),
}


def diagnose() -> list[dict[str, Any]]:
    """One entry per thing: what it is, whether it is there, what it is for, how to get it."""
    found: list[dict[str, Any]] = []
    for name, value in environment().items():
        found.append({"what": name, "ok": True, "is": value, "hint": ""})
    devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    found.append({"what": "devices", "ok": True, "is": ", ".join(devices), "hint": ""})
    for package, (use, hint) in _PACKAGES.items():
        try:
            importlib.import_module(package)
            found.append({"what": package, "ok": True, "is": f"there: {use}", "hint": ""})
        except Exception as error:
            reason = "" if isinstance(error, ImportError) else f" ({type(error).__name__}: {error})"
            found.append({"what": package, "ok": False, "is": f"missing{reason}: {use}", "hint": hint})
    free = shutil.disk_usage(Path.cwd()).free
    roomy = free > 2**30
    found.append(
        {
            "what": "disk",
            "ok": roomy,
            "is": f"{free / 2**30:.1f} GiB free here",
            "hint": "" if roomy else "make room",
        }
    )
    writable = os.access(Path.cwd(), os.W_OK)
    found.append(
        {
            "what": "directory",
            "ok": writable,
            "is": str(Path.cwd()),
            "hint": "" if writable else "it is read-only",
        }
    )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """For people."""
    width = max(len(entry["what"]) for entry in found)
    lines = []
    for entry in found:
        hint = f"   -> {entry['hint']}" if entry["hint"] else ""
        lines.append(f"{'ok ' if entry['ok'] else '-- '} {entry['what']:<{width}}  {entry['is']}{hint}")
    return "\n".join(lines)
