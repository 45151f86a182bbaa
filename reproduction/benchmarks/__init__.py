"""Benchmarks on real networks, and of cost and robustness. `python -m reproduction bench --help` lists them.

Each module has a `main` that runs its units, writes them to OUT/NAME.json, and prints a table.
"""


def shown(name: str) -> str:
    """The name of a row in tables and pictures. Older results call the mask search "exchanges"."""
    return name.replace("exchanges", "mask search")
