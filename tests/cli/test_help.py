"""Help is quick and needs no torch."""

import os
import subprocess
import sys


def test_help_is_quick_and_needs_no_torch():
    """In a process of its own; the best of three, and processor time, for others may be at work."""
    code = (
        "import sys, time\n"
        "from fishleg.cli.commands import main\n"
        "try:\n    main(['prune', '--help'], prog_name='fishleg')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(time.process_time(), 'torch' in sys.modules, file=sys.stderr)\n"
    )
    best = 1e9
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "--sparsity" in result.stdout
        seconds, torch_is_there = result.stderr.split()
        assert torch_is_there == "False"
        best = min(best, float(seconds))
    assert best < 0.3


def test_the_command_answers_help_at_once():
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "fishleg", "--help"], capture_output=True, check=True)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        times.append(used)
    assert min(times) < 0.3
