"""Real models and data for the demo, the examples, the experiments and the benchmarks."""
