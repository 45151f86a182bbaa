"""Structures of Q by name or function, and the limits of their size."""

import logging
import math

import pytest
import torch
from helpers import dense_inverse, small_conv_net
from oracles import random_like_parameters
from torch import nn

from fishleg import InverseFisher
from fishleg.inverse.operators import (
    BlockFactor,
    Diagonal,
    DiagonalFactor,
    FullFactor,
    Gram,
    Identity,
    Kronecker,
    SplitFactor,
)
from fishleg.inverse.structures import STRUCTURES

MATRICES = {"identity": Identity, "diagonal": Diagonal, "block": Gram, "full": Gram, "triangular": Gram}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(structure: str) -> None:
    model = small_conv_net()
    inverse = InverseFisher.from_model(model, structure, scale=2.5, block_size=4)
    assert list(inverse.layers) == ["0", "3", "vectors:0"]
    matrix, norm = (inverse.operator(name) for name in ("0", "vectors:0"))
    assert type(matrix) is MATRICES.get(structure, Kronecker)
    assert type(norm) is (Identity if structure == "identity" else Diagonal)
    if isinstance(matrix, Gram):
        assert isinstance(matrix.factor, BlockFactor if structure == "block" else FullFactor)
        assert getattr(matrix.factor, "triangular", False) == (structure == "triangular")
    if isinstance(matrix, Kronecker):
        assert (matrix.log_d is not None) == (structure in ("scaled-kronecker", "eigen-kronecker"))
        assert (matrix.log_e is not None) == (structure in ("ekfac", "eigen-kronecker"))
    n = sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(dense_inverse(inverse, model), 2.5 * torch.eye(n))
    assert inverse.notes == {}
    assert all(name in inverse.describe() for name in inverse.layers)


@pytest.mark.parametrize(
    ("layer", "limit", "options", "left", "right", "note"),
    [
        (
            nn.Linear(20, 3),
            20,
            {},
            FullFactor,
            BlockFactor,
            "input side 21 > max_factor_dim = 20: blocks of 20",
        ),
        (
            nn.Linear(3, 20),
            10,
            {},
            BlockFactor,
            FullFactor,
            "output side 20 > max_factor_dim = 10: blocks of 10",
        ),
        (
            nn.Linear(40, 2),
            5,
            {},
            FullFactor,
            DiagonalFactor,
            "input side 41 > 8 × max_factor_dim = 40: diagonal",
        ),
        (nn.Linear(39, 2), 5, {}, FullFactor, BlockFactor, "input side 40 > max_factor_dim = 5: blocks of 5"),
        (nn.Embedding(90, 3), 10, {}, DiagonalFactor, FullFactor, "output side 90 > 8 × max_factor_dim = 80"),
        (nn.Conv2d(3, 2, 3), 10, {}, FullFactor, SplitFactor, "input side 28 > max_factor_dim = 10: split"),
        (nn.Conv2d(12, 2, 3), 11, {}, FullFactor, DiagonalFactor, "input side 109 > 8 × max_factor_dim = 88"),
        (nn.Conv1d(12, 2, 3), 11, {}, FullFactor, BlockFactor, "input side 37 > max_factor_dim = 11: blocks"),
        (nn.Conv2d(3, 2, 3), 99, {"split_conv": True}, FullFactor, SplitFactor, None),
        (nn.Conv2d(3, 2, 1), 99, {"split_conv": True}, FullFactor, FullFactor, None),
    ],
)
def test_factor_too_large(
    layer: nn.Module,
    limit: int,
    options: dict[str, bool],
    left: type,
    right: type,
    note: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fishleg.inverse"):
        inverse = InverseFisher.from_model(nn.Sequential(layer), max_factor_dim=limit, **options)
    q = inverse.operator("0")
    assert isinstance(q, Kronecker)
    assert (type(q.L), type(q.R)) == (left, right)
    assert [record.message.startswith(f"0: {note}") for record in caplog.records] == [True] * (
        note is not None
    )
    assert inverse.notes.get("0", "None").startswith(str(note))
    assert inverse.notes.get("0", "") in inverse.describe()
    v = random_like_parameters(nn.Sequential(layer))
    torch.testing.assert_close(inverse.matvec(v), v)


def test_full_matrix_too_large_is_cut_in_blocks(caplog: pytest.LogCaptureFixture) -> None:
    inverse = InverseFisher.from_model(nn.Linear(4, 3), "full", max_factor_dim=14, block_size=6)
    assert isinstance(inverse.operator("weight"), Gram)
    assert isinstance(inverse.operator("weight").factor, BlockFactor)
    assert "n = 15 > max_factor_dim = 14: blocks of 6" in caplog.text


def test_structure_by_function() -> None:
    inverse = InverseFisher.from_model(
        small_conv_net(), lambda layer: Gram(layer.shape, DiagonalFactor(math.prod(layer.shape)))
    )
    assert all(isinstance(inverse.operator(name), Gram) for name in inverse.layers)
