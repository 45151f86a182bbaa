"""The paper's figures, benchmarks and experiments, with their data, networks and results.

Not part of the installed package. `python -m reproduction --help`, from the root of the repository, lists the
commands.
"""
