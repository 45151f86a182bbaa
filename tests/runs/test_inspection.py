"""Looking into checkpoints."""

import json

import torch

from fishleg.runs.inspection import inspect_path


def test_sparsity_counts_prunable_matrices_without_zeros(tmp_path):
    from safetensors.torch import save_file

    state = {"a": torch.tensor([[0.0, 1.0]]), "b": torch.ones(1, 2), "c": torch.ones(1, 2)}
    save_file(state, tmp_path / "model.safetensors")
    alone = inspect_path(tmp_path / "model.safetensors")
    assert (alone.sparsity, alone.sparsity_of) == (0.5, "matrices that have zeros")
    layers = [{"name": name, "reason": "frozen" if name == "c" else None} for name in state]
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "layers": layers}))
    of_run = inspect_path(tmp_path)
    assert (of_run.sparsity, of_run.sparsity_of) == (0.25, "prunable matrices")
