"""The paper's figures: their parts against slow, obvious versions, and each run from beginning to end."""

import builtins
import importlib
import json
import re
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from fishleg.inverse.estimators import estimate
from reproduction.paper import ablation, claims, estimation, init, layer, tables
from reproduction.paper.ablation import blocks, pruning
from reproduction.paper.harness import Unit, duration, mean, mean_sem, plain, run_units, spaced, steps_to
from reproduction.paper.problems import (
    Ensemble,
    Problem,
    Projection,
    approximate_then_invert,
    exponential,
    nearest_kronecker,
    our_options,
    paper_options,
    riemannian,
)

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
    assert len(said) == len(record["units"])
    assert "left" in said[0]

    # a run that was killed has no summary yet, and lacks some of its units
    lost = [key for key in record["units"] if "time" not in key][-2:]
    kept = {key: unit for key, unit in record["units"].items() if key not in lost}
    path.write_text(json.dumps({"settings": record["settings"], "units": kept}))
    said.clear()
    drawn: list[Path] = []
    monkeypatch.setattr(MODULES[name], "_draw", lambda *_: dict.fromkeys(panels))
    monkeypatch.setattr(MODULES[name], "save_picture", lambda _, path, smoke: drawn.append(path))
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


def test_units_are_kept_and_those_of_other_settings_are_not(tmp_path: Path) -> None:
    calls: list[str] = []

    def fail(_: dict) -> float:
        raise RuntimeError("the plug was pulled")

    def unit(key: str) -> Unit:
        return Unit(key, lambda done: calls.append(key) or len(done))

    path = tmp_path / "deep" / "x.json"
    with pytest.raises(RuntimeError):
        run_units(path, {"a": (1, 2)}, [unit("first"), Unit("second", fail)], calls.append)
    calls.clear()
    assert run_units(path, {"a": (1, 2)}, [unit("first"), unit("second")], lambda _: None) == {
        "first": 0,
        "second": 1,
    }
    assert calls == ["second"]
    told: list[str] = []
    run_units(path, {"a": (1, 3)}, [unit("first")], told.append)
    assert calls == ["second", "first"]
    assert "x.json has other settings: it is x.old1.json now" in told
    assert set(json.loads((path.parent / "x.old1.json").read_text())["units"]) == {"first", "second"}
    run_units(path, {"a": (1, 3)}, [unit("third")], told.append)
    assert calls.pop() == "third"
    assert set(json.loads(path.read_text())["units"]) == {"first", "third"}  # nothing is lost
    path.write_text("{ half a fi")
    run_units(path, {"a": (1, 3)}, [unit("first")], told.append)
    assert calls == ["second", "first", "first"]
    assert "x.json is not whole: it is x.old2.json now" in told  # and the first that was put aside is there
    assert set(json.loads((path.parent / "x.old1.json").read_text())["units"]) == {"first", "second"}


def test_the_time_left_is_told_from_work_that_was_done(tmp_path: Path) -> None:
    told: list[str] = []
    units = [
        Unit("file", lambda _: time.sleep(0.4), 0),
        Unit("a", lambda _: time.sleep(0.05), 1),
        Unit("b", lambda _: None, 4),
    ]
    run_units(tmp_path / "x.json", {}, units, told.append)
    assert "left" not in told[0]  # what was there already says nothing about the rest
    assert 0.2 <= float(re.search(r"about (\S+) s left", told[1]).group(1)) < 1.2
    assert "left" not in told[2]


def test_numbers_for_json_and_people() -> None:
    assert plain({1: (1 / 3, float("nan"), [float("inf"), True])}) == {"1": [0.333333, None, [None, True]]}
    assert mean([1.0, None]) == float("inf")
    assert mean_sem([1.0, 3.0]) == {"mean": 2.0, "sem": 1.0}
    assert duration(3.14159) == "3.14 s"
    assert duration(600) == "10 min"
    assert spaced(1000, 4) == [1, 10, 100, 1000]


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


def test_an_ensemble_learns_each_problem_as_if_alone() -> None:
    problems = [Problem(exponential(12, 4), 0.05, seed) for seed in range(3)]
    ensemble = Ensemble(problems, 0, batch=50)
    inverse = ensemble.inverse("full", 1.0)
    ensemble.learn(inverse, our_options(50), 400)
    for problem, Q in zip(problems, ensemble.dense(inverse), strict=True):
        assert problem.distance(Q) < 0.15
        assert 0 <= problem.gap(Q) < 1e-2
    h = ensemble.gradients(ensemble.batch(20_000))
    for problem, samples in zip(problems, h, strict=True):
        torch.testing.assert_close(samples.mT @ samples / len(samples), problem.F, atol=0.05, rtol=0)


def test_aimed_probes_serve_their_aim() -> None:
    problem = Problem(exponential(20, 6), 0.01, 0)
    ensemble = Ensemble([problem], 0, batch=50)
    start = 1 / float(problem.F_gamma.diagonal().mean())
    inverse = ensemble.inverse("diagonal", start)
    ensemble.learn(inverse, paper_options(0.05, probe=ensemble.aimed), 600)
    (aimed,) = ensemble.dense(inverse)
    inverted = approximate_then_invert(problem.F_gamma, "diagonal")
    assert problem.action_error(aimed) < 0.8 * problem.action_error(inverted)


def test_problem_and_its_scores() -> None:
    problem = Problem(exponential(6, 2), 0.1, 3)
    torch.testing.assert_close(problem.inverse @ problem.F_gamma, torch.eye(6, dtype=torch.float64))
    assert problem.distance(problem.inverse) < 1e-6
    assert riemannian(problem.inverse * torch.e, problem.F_gamma) == pytest.approx(6**0.5)
    assert problem.gap(problem.inverse) == pytest.approx(0, abs=1e-12)
    assert problem.action_error(2 * problem.inverse) == pytest.approx(1)
    assert problem.mse(problem.w) == 0


def test_nearest_kronecker_is_the_permuted_svd() -> None:
    F = torch.stack([Problem(exponential(12, 5), 0.1, seed).F_gamma for seed in range(2)])
    A, B = nearest_kronecker(F, 3, 4)
    for f, a, b in zip(F, A, B, strict=True):
        permuted = torch.stack([f[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten()
                                for i, j in product(range(3), repeat=2)])  # fmt: skip
        best = torch.linalg.svdvals(permuted)[1:].square().sum()
        torch.testing.assert_close((f - torch.kron(a, b)).square().sum(), best)
        assert torch.linalg.eigvalsh(a).min() > 0
        assert torch.linalg.eigvalsh(b).min() > 0


def test_obert_in_one_go_is_its_recursion_and_the_baseline() -> None:
    problem = Problem(exponential(12, 5), 0.1, 0)
    x = Ensemble([problem], 0).batch(40)[:, 0]
    # h = ±x, and the sign does not matter
    at_once = blocks.obert(x, 4, 0.1).dense().detach()
    one_by_one = blocks.obert_recursion(iter(x), 40, 12, 4, 0.1)
    torch.testing.assert_close(at_once, torch.block_diag(*one_by_one))
    q, _ = estimate(
        "obert", Projection(1, 12), [x], "gaussian", gamma=0.1, samples=40, sub_batch=1, block_size=4
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


def test_a_goal_counts_once_it_is_kept() -> None:
    assert steps_to(0.1, [1, 0.1, 0.05]) == 2
    assert steps_to(0.1, [1, 0.05, 0.2, 0.1, 0.01], at=[1, 2, 4, 8, 16]) == 8  # it was there before, and left
    assert steps_to(0.1, [0.05, None]) == steps_to(0.1, [0.05, 0.2]) == float("inf")


def test_the_gap_among_kept_weights_is_zero_for_their_own_inverse() -> None:
    real = layer.RealLayer(30, width=2)
    keep = torch.arange(130) % 3 != 0
    best = torch.linalg.inv(real.damped()[keep][:, keep])
    assert real.gap(best, keep) == pytest.approx(0, abs=1e-9)
    masked = torch.linalg.inv(real.damped())[keep][:, keep]  # which is not the inverse of what is left
    assert real.gap(masked, keep) > 1e-3


def test_hours_on_two_cores_follow_from_the_parts(tmp_path: Path) -> None:
    dense = {"weights": "w", "curve": [{"cpu_seconds": 3600.0}]}
    arms = {f"arm {i}": {"cpu_seconds": 3600.0 * hours} for i, hours in enumerate((3, 1, 1))}
    units = {"dense": dense, **arms}
    (tmp_path / "unstructured-cifar10.json").write_text(json.dumps({"units": units}))
    last = tables.cost(tmp_path).splitlines()[-1]
    # one hour of waiting for the dense model, then one process has three hours' work and the other two
    assert last == "| all of cifar10 |  | 6.00 | 4.00 |"


@pytest.mark.parametrize(
    ("experiments", "hours"),
    [
        ([("a", 1.0, [1.0])], 2.0),
        ([("a", 1.0, [1.0, 1.0])], 2.0),  # one waits for the dense model
        ([("a", 1.0, [1.0]), ("b", 1.0, [1.0])], 2.0),  # each trains its own
        ([("a", 1.0, [1.0]), ("a", 1.0, [1.0])], 2.0),  # of the same dense model
        ([("a", 0.0, [4.0]), ("a", 0.0, [1.0, 1.0, 1.0])], 4.0),  # from opposite ends
        ([("a", 0.0, [1.0, 1.0, 1.0, 3.0])], 4.0),  # the longest comes last
    ],
)
def test_two_processes_take_parts_from_opposite_ends(experiments: list[tables.Parts], hours: float) -> None:
    assert tables.makespan(experiments) == hours


def test_rank_correlation() -> None:
    assert ablation._rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert ablation._rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert ablation._rank_correlation([1, 1, 1], [3, 2, 1]) == 0


def test_the_document_shows_the_committed_results() -> None:
    root = Path(__file__).parent.parent
    document, results = root / "docs" / "reproduction.md", root / "experiments" / "results" / "paper"
    if not results.is_dir():
        pytest.skip("the results are not part of the source distribution")
    text = document.read_text("utf-8")
    assert tables.fill(text, results) == text
    for name in tables.tables(results):
        assert f"<!-- table: {name} -->\n|" in text


def test_readme_and_results_show_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent.parent
    if not (root / "benchmarks" / "results").is_dir():
        pytest.skip("the results are not part of the source distribution")
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    made = importlib.import_module("tables").tables()
    texts = [(root / name).read_text("utf-8") for name in ("README.md", "docs/results.md")]
    assert [tables.renew(text, made) for text in texts] == texts
    for name in made:
        assert any(f"<!-- table: {name} -->\n|" in text for text in texts)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        ("none", "none"),
        (0.0123456, "0.0123"),
        (1305.0, "1305"),
        (0.00003, "3.00e-05"),
        ({"mean": 0.5, "sem": 0.0123}, "0.5 ± 0.01"),
        ({"mean": None, "sem": 0.0}, "–"),
    ],
)
def test_cells(value: object, shown: str) -> None:
    assert tables._cell(value) == shown
