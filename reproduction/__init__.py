"""The paper's figures, the benchmarks and experiments of fishleg; not part of the installed package."""
