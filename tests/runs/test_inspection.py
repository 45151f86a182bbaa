"""Looking into checkpoints."""

import json

import pytest
import torch

from fishleg.formats import checkpoint
from fishleg.formats.tensor_files import to_bytes
from fishleg.runs.errors import ToolError
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


def test_names_and_headers_cannot_control_the_terminal(tmp_path):
    state = {"a\x1b[2J\nb: 99 %": torch.tensor([[0.0, 1.0]])}
    data = to_bytes(state, {"recipe": "[model]\n\x1b]0;title\x07\u202e"})
    (tmp_path / "model.safetensors").write_bytes(data)
    table = inspect_path(tmp_path / "model.safetensors").table()
    assert r"a\x1b[2J\nb: 99 %" in table
    assert "[model]\n\\x1b]0;title\\x07\\u202e" in table
    assert not set(table) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": [torch.ones(2)]}, "holds no state dict of tensors"),
        ({"model": {1: torch.ones(2)}}, "holds no state dict of tensors"),
        ({"model": {"w": torch.ones(2)}, "session": {"surgeon": {}}}, "holds masks that do not fit"),
        (
            {"model": {"w": torch.ones(2)}, "session": {"surgeon": {"masks": {"w": 3}, "history": []}}},
            "holds masks that do not fit its weights",
        ),
        (
            {
                "model": {"w": torch.ones(2)},
                "session": {"surgeon": {"masks": {"w": torch.ones(3, dtype=torch.bool)}, "history": []}},
            },
            "holds masks that do not fit its weights: The shape of the mask",
        ),
    ],
)
def test_checkpoints_with_other_content_are_told(tmp_path, content, message):
    checkpoint.save(tmp_path / "000000.ckpt", content)
    with pytest.raises(ToolError, match=message):
        inspect_path(tmp_path / "000000.ckpt")
