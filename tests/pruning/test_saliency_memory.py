"""Scores of rows and groups on large layers: closed forms, and no more memory than a layer asks for."""

import subprocess
import sys

import pytest
import torch

from fishleg.inverse.operators import BlockFactor, Diagonal, Gram, Identity, Operator
from fishleg.pruning import saliency
from fishleg.pruning.saliency import group_saliency, row_saliency

LIMIT_GB = 8  # of address space; the blocks [512, 4608, 4608] would take 43 GB


def operators() -> dict[str, Operator]:
    torch.manual_seed(0)
    diagonal = Diagonal((5, 7)).double()
    torch.nn.init.normal_(diagonal.log_q)
    blocks = Gram((5, 7), BlockFactor(35, 4)).double()
    for parameter in blocks.parameters():
        torch.nn.init.normal_(parameter)
    return {"diagonal": diagonal, "identity": Identity((5, 7), 0.3).double(), "blocks": blocks}


def brute_force(w: torch.Tensor, q: Operator, groups: torch.Tensor) -> list[float]:
    values, dense = w.flatten(), q.dense()
    return [float(0.5 * values[g] @ torch.linalg.solve(dense[g][:, g], values[g])) for g in groups.unbind(0)]


@pytest.mark.parametrize("name", ["diagonal", "identity", "blocks"])
def test_scores_of_rows_and_groups_are_those_of_the_dense_matrix(name: str) -> None:
    q = operators()[name]
    w = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(35).view(5, 7)
    with torch.no_grad():
        assert row_saliency(w, q).tolist() == pytest.approx(brute_force(w, q, rows), rel=1e-10)
        groups = torch.randperm(35, generator=torch.Generator().manual_seed(2))[:32].view(8, 4)
        assert group_saliency(w, q, groups).tolist() == pytest.approx(brute_force(w, q, groups), rel=1e-10)


@pytest.mark.parametrize("name", ["diagonal", "identity"])
def test_a_diagonal_operator_is_not_asked_for_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("[rows, n_in, n_in] was asked for")

    monkeypatch.setattr(Operator, "blocks", refused)
    q = operators()[name]
    with torch.no_grad():
        assert row_saliency(torch.ones(5, 7, dtype=torch.float64), q).shape == (5,)


def test_blocks_are_formed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, shapes = operators()["blocks"], []
    original = Operator.blocks

    def recorded(self: Operator, groups: torch.Tensor) -> torch.Tensor:
        found = original(self, groups)
        shapes.append(tuple(found.shape))
        return found

    w = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = row_saliency(w, q)
        monkeypatch.setattr(Operator, "blocks", recorded)
        monkeypatch.setattr(saliency, "_ENTRIES_AT_A_TIME", 100)
        assert torch.equal(row_saliency(w, q), whole)
    assert shapes == [(2, 7, 7), (2, 7, 7), (1, 7, 7)]


PRUNE_A_LARGE_LAYER = f"""
import resource, torch
from torch import nn
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_GB} << 30, {LIMIT_GB} << 30))
from fishleg import PruningOptions, Surgeon
model = nn.Sequential(nn.Conv2d(512, 512, 3, bias=False), nn.Flatten(), nn.Linear(512, 2))
options = PruningOptions(
    method="METHOD", pattern="rows", samples=4, sub_batch=2, measure_batches=1, batchnorm_batches=0
)
step = Surgeon(model, [torch.randn(4, 512, 3, 3) for _ in range(2)], options=options).prune(0.5)
print(step.sparsity)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["magnitude", "diagonal"])
def test_rows_of_a_large_convolution_need_little_memory(method: str) -> None:
    code = PRUNE_A_LARGE_LAYER.replace("METHOD", method)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "0.5"
