"""What Q does to the weights: scores of blocks, rows of embeddings, compensations that are not finite."""

import logging
import re
from typing import Any

import pytest
import torch
from helpers import QUICK, BagOfWords, inputs_6, net_6_10_4, quick_prune, sentences
from torch import Tensor, nn

from fishleg import PruningOptions, Surgeon
from fishleg.pruning import pruner


@pytest.mark.parametrize("pattern", ["2:4", "global"])
@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_padding_is_never_moved(pattern: str, padding: float) -> None:
    model = BagOfWords(padding)
    sparse = quick_prune(model, sentences(), pattern=pattern)
    row, before = sparse.words.weight[0], model.words.weight[0]
    kept = row != 0
    assert torch.equal(row[kept], before[kept])
    if pattern == "global":  # a pattern may ask for zeros in every row
        assert torch.equal(row, before)
    moved = sparse.words.weight[1:]
    assert bool((moved[moved != 0] != model.words.weight[1:][moved != 0]).any())


def test_words_that_never_occur_stay_as_they_are_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = BagOfWords()
    with caplog.at_level(logging.WARNING):
        sparse = quick_prune(model, sentences(30), sparsity=[0.3, 0.5])
    row, before = sparse.words.weight[30:], model.words.weight[30:]
    assert torch.equal(row[row != 0], before[row != 0])
    told = [r.getMessage() for r in caplog.records if "never occurred" in r.getMessage()]
    assert len(told) == 1
    assert re.match(r"10 of the 40 rows of words\.weight never occurred .*\d+ % of them go now", told[0])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        quick_prune(BagOfWords(), sentences())
    assert "never occurred" not in caplog.text


def test_blocks_are_neighbouring_channels() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 6, 2), nn.Flatten(), nn.Linear(18, 8), nn.Linear(8, 4)
    )

    def forward(m: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = m[5](m[4](m[3](m[2](m[1](m[0](batch)).flatten(2)))))
        return outputs

    surgeon = Surgeon(
        model,
        [torch.randn(8, 4, 4, 4) for _ in range(3)],
        options=PruningOptions(**QUICK, pattern="block:4"),
        forward=forward,
    )
    steps = [surgeon.prune(sparsity) for sparsity in (0.3, 0.6)]
    assert steps[-1].sparsity == pytest.approx(0.6, abs=0.01)
    assert surgeon.weights.reasons["4.weight"] is not None
    for name in ("0.weight", "2.weight", "5.weight"):
        zeros = (model.get_parameter(name) == 0).unflatten(1, (-1, 4)).sum(2)
        assert set(zeros.unique().tolist()) == {0, 4}, name
        assert torch.equal(zeros == 4, ~surgeon.masks[name].unflatten(1, (-1, 4)).any(2))


def test_the_score_of_a_block_is_that_of_its_channels() -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, 4))
    data = [torch.randn(8, 4, 2, 2) for _ in range(3)]
    surgeon = Surgeon(
        model, data, options=PruningOptions(**QUICK, pattern="block:2", method="exact", include=["0.weight"])
    )
    q = surgeon.curvature.estimate(surgeon.masks)
    masks, inverse = surgeon.pruner.select(q, 1 / 12, surgeon.masks), q.operator("0").dense().detach()
    flat = torch.cat([model[0].weight.flatten(1), model[0].bias.unsqueeze(1)], 1).flatten().detach()
    place = torch.arange(3 * 17).view(3, 17)[:, :16].view(3, 4, 2, 2)
    costs = {
        (o, c, i, j): float(flat[g] @ torch.linalg.solve(inverse[g][:, g], flat[g]))
        for o in range(3) for c in (0, 2) for i in range(2) for j in range(2)
        for g in [place[o, c : c + 2, i, j]]
    }  # fmt: skip
    cheapest = sorted(costs, key=lambda key: costs[key])[:2]
    gone = (~masks["0.weight"]).nonzero().tolist()
    assert gone == sorted([o, c + k, i, j] for o, c, i, j in cheapest for k in (0, 1))


def test_weights_that_would_not_be_finite_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net_6_10_4()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    surgeon = Surgeon(model, inputs_6(), options=PruningOptions(**QUICK, method="diagonal"))

    real = pruner.compensate

    def broken(w: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(w, *args, **kwargs)
        return type(result)(result.delta * (torch.nan if len(w) == 4 else 1), result.predicted)

    monkeypatch.setattr(pruner, "compensate", broken)
    with pytest.raises(
        ValueError, match=r"the compensation of '2\.weight' is not finite; nothing was changed"
    ):
        surgeon.prune(0.5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
