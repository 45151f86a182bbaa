"""The page docs/transcript.md: commands that are really run, in an empty directory, and what they print.

`python docs/generate_transcript.py` writes the page. tests/test_transcript.py runs the commands again and
compares the page, without the numbers that depend on the machine.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "transcript.md"
INSTALL = 'pip install "PATH/TO/fishleg[cli,plot,onnx]"'
SHOWN_DIRECTORY = "/home/you/empty"  # instead of the temporary directory
COMMANDS = {
    "fishleg prune workload:digits -s 90%": (
        "Prune a model. `workload:digits` is built in: a small network, which is trained first, and its\n"
        "data. For a model of your own see [the command line](how-to/command-line.md)."
    ),
    "fishleg eval fishleg-run": (
        "Measure the sparse model again, from its file. `fishleg-run/report.html` is the report: open it in\n"
        "a browser."
    ),
    "fishleg export fishleg-run --to model.onnx": (
        "Write it as ONNX, for a program without PyTorch. [Export a model](how-to/export.md) has the other\n"
        "formats."
    ),
    "fishleg bench fishleg-run --onnx model.onnx": "Measure how long a forward pass takes.",
}
ABOUT = f"""\
<!-- Written by docs/generate_transcript.py from what the commands print: do not edit this page. -->

# A transcript

From an empty directory to a pruned model, its report, an exported file and a measured latency, in five
commands. This is what they print, with one thread (`OMP_NUM_THREADS=1`), on one machine. Only the name of the
directory was changed. A test runs the commands again and compares. It does not run the first:

```sh
{INSTALL}   # PATH/TO/fishleg: a checkout of the repository
```
"""
LAST = """\
The last lines say it: zeros alone do not make a network faster. [Smaller and faster
networks](how-to/smaller-and-faster.md) shows what does.
"""


def run_commands(directory: Path) -> dict[str, str]:
    """Run every command in a process of its own, in this directory; {command: what it prints}.

    Raises:
        RuntimeError: A command has failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT / "src"), environment.get("PYTHONPATH")])
    )
    printed = {}
    for command in COMMANDS:
        arguments = [sys.executable, "-m", *shlex.split(command)]
        ran = subprocess.run(
            arguments, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if ran.returncode != 0:
            raise RuntimeError(f"{command} ended with {ran.returncode}:\n{ran.stdout}")
        printed[command] = ran.stdout.replace(str(directory), SHOWN_DIRECTORY)
    return printed


def page(printed: dict[str, str]) -> str:
    """The Markdown of the page."""
    parts = [ABOUT]
    for command, text in printed.items():
        parts.append(f"{COMMANDS[command]}\n\n```text\n$ {command}\n{text.rstrip()}\n```\n")
    return "\n".join([*parts, LAST])


def masked(text: str) -> list[str]:
    """The lines of a page without what depends on the machine: numbers, warnings about them, verdicts."""
    lines = []
    for line in text.splitlines():
        if line.startswith("warning:"):  # whether there is one depends on the trained network
            continue
        if not line.startswith(("$ ", "pip ")):
            line = re.sub(r", about .* left$", "", line)
            line = re.sub(r"^(Clearly faster than [\w ]+:) .*", r"\1 #", line)
            line = re.sub(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", line)
        lines.append(" ".join(line.split()))
    return lines


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(page(run_commands(Path(scratch).resolve())), encoding="utf-8")
