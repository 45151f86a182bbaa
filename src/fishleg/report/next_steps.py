"""What to do with the model of a finished run: titles, and commands or code to copy."""

from __future__ import annotations

import json
import os
import re
import shlex
from html import escape
from pathlib import Path, PurePath
from typing import Any

from fishleg.report.record import prunes_rows
from fishleg.report.style import figure

_PLAIN, _PACKED, _SMALL = "model.safetensors", "packed.safetensors", "small.safetensors"
_SEMI_STRUCTURED = """\
import torch
from torch import nn

model = model.half().cuda()
for module in model.modules():  # the kernels take Linear layers of these sizes
    if isinstance(module, nn.Linear) and module.out_features % 32 == 0 and module.in_features % 64 == 0:
        weight = module.weight.detach()
        if (weight.reshape(-1, 4) != 0).sum(1).max() <= 2:
            module.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(weight))"""


def next_steps(record: dict[str, Any], directory: str | PurePath) -> list[tuple[str, str]]:
    """List what can be done with the model of a run: load, measure, fine-tune, export, time it.

    Args:
        record: The record of the run, as run.json holds it.
        directory: The directory of the run, as it should be written in the commands.

    Returns:
        Pairs of a title and a command or Python code. A command begins with `fishleg`. The code of a step
        goes on from the code that loads the model. For a run that has not finished, how to go on with it.
    """
    at = shlex.quote(str(directory))
    if record.get("status") != "finished":
        return [("Continue the run", f"fishleg resume {at}")]
    shrunk = record.get("bytes_small") is not None
    steps = [
        *_load(record, PurePath(directory)),
        ("Measure it", f"fishleg eval {at}"),
        ("Fine-tune it", _fine_tune(keeps_zeros=not shrunk)),
        ("Export it to ONNX", f"fishleg export {at} --to model.onnx"),
        ("Measure its latency", f"fishleg bench {at}"),
    ]
    if record.get("pattern") == "2:4":
        steps.append(("Run its 2:4 layers on a GPU", _SEMI_STRUCTURED))
    return steps


def short_path(directory: Path, base: Path) -> str:
    """Write a path as a user in another directory would.

    Args:
        directory: The path.
        base: The directory in which a command is given.

    Returns:
        The path relative to `base` where it lies below it, otherwise the absolute path.
    """
    directory, base = Path(os.path.abspath(directory)), Path(os.path.abspath(base))
    return str(directory.relative_to(base)) if directory.is_relative_to(base) else str(directory)


def next_steps_section(run: dict[str, Any], directory: str | PurePath | None) -> str:
    """Show what can be done with the model.

    Args:
        run: The record of the run.
        directory: The directory of the run; None: unknown, and the section is left out.

    Returns:
        The HTML of the section.
    """
    if directory is None:
        return ""
    base = run.get("base")
    known = isinstance(base, str) and base != ""
    shown = short_path(Path(directory), Path(str(base))) if known else str(directory)
    steps = next_steps(run, shown)
    items = "".join(
        f'<li><h3>{escape(title)}</h3><pre tabindex="0">\n{escape(code)}</pre></li>' for title, code in steps
    )
    reading = f"For use in the directory {base}." if known and not Path(shown).is_absolute() else ""
    return figure("What next", reading, f'<ol class="steps">{items}</ol>{_faster(run)}')


def _faster(run: dict[str, Any]) -> str:
    """Return how to get a model that runs faster, where this one does not."""
    if run.get("status") != "finished" or prunes_rows(run) or run.get("pattern") == "2:4":
        return ""
    texts = "Dense kernels are no faster with single zeros. For smaller layers, prune with", "for the sparse"
    return (
        f'<p class="reading">{texts[0]} <code>--pattern rows</code>; {texts[1]} kernels of a GPU, with '
        "<code>--pattern 2:4</code>.</p>"
    )


def _load(record: dict[str, Any], directory: PurePath) -> list[tuple[str, str]]:
    imports, call = _maker(str(record.get("name") or ""))
    shrunk = record.get("bytes_small") is not None
    lines = [*(["import fishleg"] if shrunk else []), "from safetensors.torch import load_file", *imports, ""]
    state = f"load_file({_quoted(directory / (_SMALL if shrunk else _PLAIN))})"
    lines.append(f"model = {call}")
    if shrunk:
        lines.append(f"fishleg.load_shrunk(model, {state})  # makes the layers as small")
        return [("Load it in Python", "\n".join([*lines, "model.eval()"]))]
    lines += [f"model.load_state_dict({state})", "model.eval()"]
    packed = f"model.load_state_dict(unpack({_quoted(directory / _PACKED)}))"
    return [
        ("Load it in Python", "\n".join(lines)),
        ("Load the packed file instead", f"from fishleg.formats import unpack\n\n{packed}"),
    ]


def _quoted(value: str | PurePath) -> str:
    """Return a text as it is written in Python code."""
    return json.dumps(str(value), ensure_ascii=False)


def _maker(name: str) -> tuple[list[str], str]:
    """Return the imports and the call that build the model which a recipe names."""
    place, _, function = name.rpartition(":")
    if place == "workload":
        call = f"WORKLOADS[{_quoted(function)}].model(trained=False)"
        return ["from fishleg.workloads.registry import WORKLOADS"], call
    module = re.sub("[/\\\\]", ".", place.removesuffix(".py").removeprefix("./"))
    if all(part.isidentifier() for part in (*module.split("."), function)):
        return [f"from {module} import {function}"], f"{function}()"
    if place.endswith(".py"):
        return ["import runpy"], f"runpy.run_path({_quoted(place)})[{_quoted(function)}]()"
    return [], "make_model()  # the function that builds your model"


def _fine_tune(keeps_zeros: bool) -> str:
    lines = ["import torch", "import fishleg"] if keeps_zeros else ["import torch"]
    lines += ["", "model.train()", "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)"]
    if keeps_zeros:
        lines.append("fishleg.keep_zeros(model, optimizer)  # weights that are zero stay zero")
    return "\n".join([*lines, "# then your own training loop with this optimizer"])
