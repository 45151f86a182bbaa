"""The paper's figures: their parts against slow, obvious versions, and each run from beginning to end."""

import builtins
import json
from pathlib import Path

import pytest
import torch

from fishleg import PruningOptions
from fishleg.inverse import estimate_inverse, make_problem
from reproduction.figures import ablation, claims, estimation, init, layer
from reproduction.figures.ablation import blocks, pruning
from reproduction.figures.problems import Ensemble, Problem, Projection, exponential, our_options
from reproduction.harness import units

pytestmark = pytest.mark.slow

MODULES = {"init": init, "estimation": estimation, "ablation": ablation, "claims": claims, "layer": layer}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODULES)
def test_smoke_runs_and_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    record = MODULES[name].run(tmp_path / "new", smoke=True, progress=said.append)
    path = tmp_path / "new" / f"{name}.json"
    panels = ("a", "bc", "d") if name == "ablation" else ()
    pictures = [path.with_name(f"{name}-{panel}.png") for panel in panels] or [path.with_suffix(".png")]
    assert json.loads(path.read_text()) == record
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert sorted(path.parent.iterdir()) == sorted([path, *pictures])
    assert len(said) == len(record["units"]) == len(record["code"])
    assert "left" in said[0]

    # a run that was killed lacks some of its units
    lost = [key for key in record["units"] if "time" not in key][-2:]
    kept = {key: unit for key, unit in record["units"].items() if key not in lost}
    path.write_text(json.dumps({**record, "units": kept}))
    said.clear()
    drawn: list[Path] = []
    monkeypatch.setattr(MODULES[name], "_draw", lambda *_: {f"-{panel}": None for panel in panels})
    monkeypatch.setattr(units, "save_picture", lambda _, path, dpi: drawn.append(path))
    assert MODULES[name].run(tmp_path / "new", smoke=True, progress=said.append) == record
    assert len(said) == 1 + len(lost)
    assert drawn == pictures


def test_the_fisher_matrix_of_the_real_layer_against_autograd() -> None:
    real = layer.RealLayer(20)
    model, x, F = real.model, real.x, real.fisher()
    packed = torch.cat([model.hidden.weight, model.hidden.bias[:, None]], 1).detach().flatten()

    def logits(v: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
        return model.last(torch.tanh(torch.cat([example, example.new_ones(1)]) @ v.view(16, 65).mT))

    slow = torch.zeros_like(F)
    for example in x:
        J, p = torch.func.jacrev(logits)(packed, example), logits(packed, example).softmax(-1)
        slow += J.mT @ (torch.diag(p) - torch.outer(p, p)) @ J / len(x)
    torch.testing.assert_close(F, slow)
    assert real.gamma == pytest.approx(0.1 * float(slow.diagonal().mean()))
    assert real.gap(torch.linalg.inv(real.damped())) == pytest.approx(0, abs=1e-9)
    assert real.gap(torch.eye(len(F), dtype=F.dtype)) > 0.1


def test_pruning_the_real_layer_removes_half_of_its_weights_and_no_bias() -> None:
    real = layer.RealLayer(40, width=3)
    learning = real.learner("eigen-kronecker", our_options(16))
    for batch in real.batches(4):
        learning.step(batch)
    real.prune(learning.inverse.operator("hidden"))
    assert int((real.model.hidden.weight == 0).sum()) == 3 * 64 // 2
    assert (real.model.hidden.bias != 0).all()


def test_squared_losses_are_biased_and_by_how_much() -> None:
    problem = Problem(exponential(6, 3), 0.05, 0)
    exact, sampled = (
        claims.squared_loss_optimum(problem, 8),
        claims.sampled_squared_loss_optimum(problem, 8, 5000),
    )
    torch.testing.assert_close(sampled, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))
    assert problem.distance(exact) > 1
    assert problem.distance(claims.squared_loss_optimum(problem, 10**9)) < 1e-6


@pytest.mark.parametrize("name", MODULES)
def test_without_matplotlib_nothing_is_started(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(module: str, *args: object, **kwargs: object) -> object:
        if module.partition(".")[0] == "matplotlib":
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"fishleg\[plot\]"):
        MODULES[name].run(tmp_path, smoke=True, progress=print)
    assert not list(tmp_path.iterdir())


def test_obert_in_one_go_is_its_recursion_and_the_baseline() -> None:
    problem = Problem(exponential(12, 5), 0.1, 0)
    x = Ensemble([problem], 0).batch(40)[:, 0]
    # h = ±x, and the sign does not matter
    at_once = blocks.obert(x, 4, 0.1).dense().detach()
    one_by_one = blocks.obert_recursion(iter(x), 40, 12, 4, 0.1)
    torch.testing.assert_close(at_once, torch.block_diag(*one_by_one))
    q, _ = estimate_inverse(
        make_problem(
            Projection(1, 12),
            [x],
            "gaussian",
            options=PruningOptions(method="obert", gamma=0.1, samples=40, sub_batch=1, block_size=4),
        )
    )
    torch.testing.assert_close(at_once, q.operator("weight").dense().detach())


def test_conditioned_is_the_inverse_without_the_removed() -> None:
    problem = Problem(exponential(10, 5), 0.1, 0)
    keep = torch.arange(10) % 3 != 0
    Q = pruning.conditioned(problem.inverse, keep).dense()[keep][:, keep]
    torch.testing.assert_close(Q, torch.linalg.inv(problem.F_gamma[keep][:, keep]))


def test_pruning_with_the_exact_inverse_finds_the_best_single_weight() -> None:
    problem = Problem(exponential(8, 3), 1e-9, 1)
    errors = pruning.prune_in_stages(
        [problem], 1, lambda kept: [pruning.conditioned(problem.inverse, kept[0])], "joint"
    )[0]

    def least_squares(without: int) -> float:
        keep = torch.arange(8) != without
        w = torch.zeros(8, dtype=torch.float64)
        w[keep] = torch.linalg.solve(problem.F[keep][:, keep], problem.F[keep] @ problem.w)
        return problem.mse(w)

    assert errors[0] == pytest.approx(min(map(least_squares, range(8))), rel=1e-4)
    assert errors == sorted(errors)
    assert len(errors) == 7


def test_the_gap_among_kept_weights_is_zero_for_their_own_inverse() -> None:
    real = layer.RealLayer(30, width=2)
    keep = torch.arange(130) % 3 != 0
    best = torch.linalg.inv(real.damped()[keep][:, keep])
    assert real.gap(best, keep) == pytest.approx(0, abs=1e-9)
    masked = torch.linalg.inv(real.damped())[keep][:, keep]  # which is not the inverse of what is left
    assert real.gap(masked, keep) > 1e-3
