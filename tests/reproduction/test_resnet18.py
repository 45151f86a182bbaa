"""The paper's ResNet18 experiments: configurations, the dense model, the arms, and each from end to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fishleg import FineTuningOptions, PruningOptions, PruningSession
from fishleg.pruning import Pruned
from fishleg.runtime.batchnorm import refresh_batchnorm
from reproduction.figures import semi_structured, unstructured
from reproduction.figures.resnet18 import config as configs
from reproduction.figures.resnet18 import dense as dense_model
from reproduction.figures.resnet18 import experiment
from reproduction.harness import plain
from reproduction.tables import resnet18 as tables

pytestmark = pytest.mark.slow

SMOKE = configs.load("smoke")


@pytest.mark.parametrize("module", [unstructured, semi_structured])
def test_smoke_runs_and_resumes(module, tmp_path: Path) -> None:
    said: list[str] = []
    record = module.run(tmp_path, smoke=True, progress=said.append)
    path = tmp_path / f"{module.NAME}-smoke.json"
    assert json.loads(path.read_text()) == record
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    arms = SMOKE.arms if module is unstructured else SMOKE.semi_structured_arms
    assert set(record["units"]) == {"dense", *(f"{arm}, seed 0" for arm in arms)}
    assert any("left" in line for line in said)
    targets = SMOKE.sparsities if module is unstructured else SMOKE.semi_structured
    for key, unit in record["units"].items():
        if key != "dense":
            assert [row["sparsity"] for row in unit["rows"]] == pytest.approx(targets, abs=0.002)
            assert all(0 <= row[when] <= 100 for row in unit["rows"] for when in ("before", "after"))

    # a run that was killed in its last part, with the dense model still there
    record["units"]["FLS + FishLeg, seed 0"]["seconds"] = -1
    kept = {k: u for k, u in record["units"].items() if k != "magnitude + SGD, seed 0"}
    path.write_text(json.dumps({"settings": record["settings"], "units": kept}))
    said.clear()
    again = module.run(tmp_path, smoke=True, progress=said.append)
    assert not [line for line in said if "dense" in line]
    assert (
        again["units"]["magnitude + SGD, seed 0"]["rows"]
        == record["units"]["magnitude + SGD, seed 0"]["rows"]
    )
    assert again["units"]["FLS + FishLeg, seed 0"]["seconds"] == -1  # it was kept as it was
    made = tables.resnet18_tables(tmp_path)
    assert f"| {arms[-1]} | " in made[f"{module.NAME}-smoke"]
    assert (f"{module.NAME}-smoke-parts" in made) == (module is unstructured)
    del again["summary"]
    path.write_text(json.dumps(again))
    assert tables.resnet18_tables(tmp_path) == {}  # it has not come to its end


def dense(tmp_path: Path, config: configs.Config = SMOKE) -> dense_model.Dense:
    return dense_model.Dense(config, dense_model.load_data(config, None, print), tmp_path, lambda _: None)


def test_stopped_training_of_the_dense_model_goes_on(tmp_path: Path) -> None:
    whole = dense(tmp_path / "whole")
    whole.path.parent.mkdir()
    expected = whole.model().state_dict()
    epochs = 0

    def stop(_: str) -> None:
        nonlocal epochs
        epochs += 1
        if epochs == 2:
            raise KeyboardInterrupt

    half = dense(tmp_path / "half")
    half.path.parent.mkdir()
    half.progress = stop
    with pytest.raises(KeyboardInterrupt):
        half.model()
    half.progress = lambda _: None
    assert dense_model.epochs_to_train(SMOKE, tmp_path) == SMOKE.dense_epochs
    assert dense_model.epochs_to_train(SMOKE, half.path.parent) == SMOKE.dense_epochs - 1
    assert dense_model.epochs_to_train(SMOKE, whole.path.parent) == 0
    again = half.model().state_dict()
    assert epochs == 2
    assert all(torch.equal(expected[key], again[key]) for key in expected)
    assert len(half.record()["curve"]) == SMOKE.dense_epochs
    found, wanted = half.record(), whole.record()
    for epoch in (*found["curve"], *wanted["curve"]):
        assert epoch.pop("cpu_seconds") > 0
    assert found == wanted


def test_dense_models_of_other_settings_lie_side_by_side(tmp_path: Path) -> None:
    first, other = dense(tmp_path), dense(tmp_path, replace(SMOKE, dense_epochs=1))
    assert len(first.record()["curve"]) == 2
    assert len(other.record()["curve"]) == 1
    assert len(list(tmp_path.iterdir())) == 2
    assert len(first.record()["curve"]) == 2


@pytest.mark.parametrize("content", [b"", b"PK damaged", None])
def test_a_damaged_dense_model_is_told_by_name(tmp_path: Path, content: bytes | None) -> None:
    model = dense(tmp_path)
    if content is None:  # whole, but something else
        torch.save({"state": 1}, model.path)
    else:
        model.path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{model.path.name} cannot be read .*: remove it"):
        model.model()


def test_the_dense_rate_may_stay_where_it_is(tmp_path: Path) -> None:
    config = replace(SMOKE, dense_rate="constant")
    for chosen, rate in ((SMOKE, 0.0), (config, SMOKE.dense_lr)):
        model = dense(tmp_path, chosen)
        model.record()
        state = torch.load(model.path, weights_only=True)
        assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(rate)
    assert len(list(tmp_path.iterdir())) == 2
    # results that are older than this setting are those of its default
    assert "dense_rate" not in SMOKE.settings("sparsities").keys() | SMOKE.dense_settings().keys()
    assert config.settings("sparsities")["dense_rate"] == config.dense_settings()["dense_rate"] == "constant"


def test_results_of_another_dense_model_are_not_added_to(tmp_path: Path) -> None:
    model = dense(tmp_path, replace(SMOKE, dense_epochs=1))
    unit = experiment.units(
        SMOKE, lambda: model, ["magnitude + SGD"], pattern="global", sparsities=(0.5,), dense_cost=1
    )[1]
    with pytest.raises(ValueError, match="those of another dense model"):
        unit.compute({"dense": {"weights": "0123"}})


def test_the_control_removes_nothing_and_trains_all_the_same(tmp_path: Path) -> None:
    model = dense(tmp_path)
    config = replace(SMOKE, epochs=0.5)
    run = experiment.prune_run(config, model, configs.CONTROL, 0, pattern="2:4", sparsities=(0.25, 0.5))
    assert [row["sparsity"] for row in run["rows"]] == [0.0, 0.0]
    renewed = model.model()
    refresh_batchnorm(renewed, model.examples.batches(config, seed=100))
    assert run["rows"][0]["before"] == model.examples.test_accuracy(renewed, "cpu")
    assert run["rows"][1]["before"] not in (
        run["rows"][0]["before"],
        run["rows"][0]["after"],
    )  # trained, renewed


def test_a_run_that_diverges_is_told_and_the_next_can_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    model = dense(tmp_path, replace(SMOKE, dense_epochs=1))
    model.progress = said.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(experiment.SGD_RATE, "ours", 1e30)
        run = experiment.prune_run(SMOKE, model, "FLS + SGD", 0, pattern="global", sparsities=(0.5, 0.75))
    assert "diverged" in said[-1]
    assert [row["sparsity"] for row in run["rows"]] == pytest.approx([0.5, 0.75], abs=0.002)
    assert run["rows"][1] == {"sparsity": 0.75, "before": None, "after": None}


def session_of(model: Any, loader: Any, surgery: dict[str, Any], tuning: dict[str, Any]) -> PruningSession:
    options, fine_tuning = PruningOptions(**surgery), FineTuningOptions(**tuning)
    return PruningSession(model, loader, options=options, fine_tuning=fine_tuning)


def until_pruned(session: PruningSession, sparsity: float) -> None:
    next(event for event in session.stage(sparsity) if isinstance(event, Pruned))


def test_both_scorers_train_with_the_same_damping(tmp_path: Path) -> None:
    model = dense(tmp_path, replace(SMOKE, dense_epochs=1))
    found = []
    for arm in ("magnitude + FishLeg", "FLS + FishLeg"):
        surgery, tuning = experiment.arm_options(SMOKE, arm)
        session = session_of(model.model(), model.examples.batches(SMOKE, 0), surgery, tuning)
        until_pruned(session, 0.5)
        found.append(session.fine_tuner.optimizer.auxiliary.gamma)
    assert 1 / 3 < found[0] / found[1] < 3


@pytest.mark.parametrize("name", configs.names())
def test_every_configuration_can_be_loaded_and_its_arms_built(name: str) -> None:
    config = configs.load(name)
    for arm in config.arms:
        surgery, tuning = experiment.arm_options(config, arm)
        PruningOptions(**surgery)
        FineTuningOptions(**tuning)
    if name.startswith("full"):
        assert (config.width, config.device, config.seeds) == (64, "cuda", (0, 1, 2))
        assert config.preset == ("ours" if name.endswith("ours") else "paper")
        assert config.batch_size == (2048 if "tiny" in name else 128)


def test_the_papers_preset_is_its_table() -> None:
    table = {"cifar10": (1e-3, 1e-3, 10, 1e-5), "tiny-imagenet": (1e-2, 1.0, 1, 1e-6)}
    for dataset, (eta, gamma, scale, eta_aux) in table.items():
        surgery, tuning = experiment.paper_preset(replace(SMOKE, dataset=dataset))
        assert tuning["momentum"] == 0.9
        assert tuning["lr"] / (1 - 0.9) == pytest.approx(eta)  # what a constant gradient is multiplied by
        assert tuning["lr"] * tuning["weight_decay"] == pytest.approx(eta * 1e-5)
        assert (surgery["gamma"], surgery["scale"], surgery["auxiliary"].lr) == (gamma, scale, eta_aux)
    for arm in configs.ARMS[:2]:
        _, options = experiment.arm_options(replace(SMOKE, preset="paper"), arm)
        assert (options["lr"], options["lr_schedule"]) == (1e-3, "constant")


def test_the_papers_preset_takes_plain_steps_from_its_scale(tmp_path: Path) -> None:
    config = replace(SMOKE, preset="paper", dense_epochs=1)
    model, examples = dense(tmp_path, config).model(), dense_model.load_data(config, None, print)
    surgery, tuning = experiment.arm_options(config, "FLS + FishLeg")
    surgery["samples"] = 6
    session = session_of(model, examples.batches(config, 0), surgery, {**tuning, "steps": 2})
    until_pruned(session, 0.5)
    curvature = session.surgeon.curvature
    for operator in map(curvature.inverse.unmasked, curvature.inverse.layers):
        torch.testing.assert_close(operator.diag(), torch.full_like(operator.diag(), 10.0), rtol=0.01, atol=0)
    list(session.stage(0.5))  # the training of the same stage
    optimizer = session.fine_tuner.optimizer
    assert optimizer.last_trust == 1
    assert optimizer.step_damping == 1
    assert optimizer.max_kl is None
    assert curvature.learning.steps == 6 + 2  # the warmup, then one with every training step


def test_a_configuration_may_extend_one_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('extends = "tiny-imagenet"\nwidth = 24')
    assert configs.load(str(path)) == replace(configs.load("tiny-imagenet"), width=24)
    path.write_text('extends = "cifar10-preset"\nwidth = 24')  # which extends another one itself
    assert configs.load(str(path)) == replace(configs.load("cifar10-preset"), width=24)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("width = 3", "dataset is missing"),
        ('dataset = "cifar10"\nwidht = 3', "unknown: widht"),
        ('dataset = "mnist"', "dataset must be one of"),
        ('dataset = "cifar10"\npreset = "best"', "preset must be one of"),
        ('dataset = "cifar10"\ndense_rate = "slow"', "dense_rate must be one of one cycle, constant"),
        ('dataset = "cifar10"\narms = ["OBS"]', "arms must be some of"),
        ('dataset = "cifar10"\narms = []', "arms must be a list of names"),
        ('dataset = "cifar10"\nwidth = 0', "width must be a whole number >= 1, got 0"),
        ('dataset = "cifar10"\nwidth = 4', "width must be >= 8, narrower networks crash some"),
        ('extends = "mnist"', "extends must be one of .*, got 'mnist'"),
        ('extends = "cifar10"\nwidht = 3', "unknown: widht; it may set extends"),
        ('dataset = "cifar10"\nwidth = "16"', "width must be a whole number >= 1, got '16'"),
        ('dataset = "cifar10"\nepochs = 0', "epochs must be a number > 0, got 0"),
        ('dataset = "cifar10"\nsparsities = [0.9, 0.5]', "0.5"),
        ('dataset = "cifar10"\nseeds = [0.5]', "seeds must be a list of whole numbers"),
        ('dataset = "cifar10"\nseeds = [0, 0]', "no two the same"),
        ('dataset = "cifar10"\nseeds = 3', "seeds must be a list of whole numbers, .*, got 3"),
        ('dataset = "cifar10"\ncrossed_seeds = [0.5]', "crossed_seeds must be a list of whole numbers"),
        (
            'dataset = "cifar10"\ncrossed_seeds = [3]',
            r"crossed_seeds must be some of the seeds \[0, 1, 2\], got",
        ),
        ('dataset = "cifar10"\nepochs = true', "epochs must be a number > 0, got True"),
        ('dataset = "cifar10"\nsparsities = 0.5', "sparsities must be a list of numbers"),
        ('dataset = "cifar10"\nsparsities = ["a"]', "sparsities must be a list of numbers"),
        ('dataset = "cifar10"\narms = 3', "arms must be a list of names"),
        ('dataset = "cifar10"\nwidth = true', "width must be a whole number >= 1, got True"),
        ('dataset = "cifar10"\nclasses = 0', "classes must be a whole number >= 1, got 0"),
        ('dataset = "cifar10"\nsemi_structured = [0.25]', "semi_structured must end with 0.5"),
        ("dataset = ", "is not TOML"),
    ],
)
def test_wrong_configurations(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rule):
        configs.load(str(path))


def test_a_configuration_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"there is no nowhere\.toml"):
        configs.load("nowhere.toml")


def test_missing_data_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--download"):
        unstructured.run(tmp_path / "out", progress=print, data=tmp_path)
    assert not (tmp_path / "out").exists()


def test_the_gain_is_split_between_scorer_and_optimizer() -> None:
    after = {
        "magnitude + SGD": [60.0, 62.0],
        "magnitude + FishLeg": [64.0, 66.0],
        "FLS + SGD": [66.0, 68.0],
        "FLS + FishLeg": [72.0, 74.0],
    }
    parts = unstructured._parts(after)
    assert [part["mean"] for part in parts.values()] == [7, 5, 12]
    parts = plain(unstructured._parts({**after, "FLS + SGD": [66.0, None]}))
    assert [part["mean"] for part in parts.values()] == [7, 5, 12]  # what has diverged is left out
    parts = plain(unstructured._parts({**after, "FLS + SGD": [None, None]}))
    assert [part["mean"] for part in parts.values()] == [None] * 3


def test_crossed_arms_may_have_fewer_seeds() -> None:
    """Means are over what each arm has, the split over what all four have."""
    config = replace(SMOKE, seeds=(0, 1), crossed_seeds=(1,), sparsities=(0.5,))
    work = experiment.units(
        config, lambda: None, config.arms, pattern="global", sparsities=(0.5,), dense_cost=0
    )
    keys = [unit.key for unit in work]
    arms = [f"{arm}, seed 0" for arm in configs.ARMS[:3]] + [f"{arm}, seed 1" for arm in configs.ARMS]
    assert keys == ["dense", *arms]
    after = {arm: 60.0 + i for i, arm in enumerate(configs.ARMS)}
    results: dict[str, Any] = {"dense": {"curve": [{"loss": 1.0, "accuracy": 75.0}]}}
    for key in keys[1:]:
        arm, seed = key.split(", seed ")
        value = after[arm] - (20.0 if seed == "0" else 0.0)
        results[key] = {"rows": [{"sparsity": 0.5, "before": 50.0, "after": value}], "seconds": 1.0}
    found = plain(unstructured.summary(config, results))
    assert found["after"]["magnitude + SGD"]["50.0 %"]["mean"] == 50
    assert found["after"]["FLS + SGD"]["50.0 %"]["mean"] == 63
    assert found["parts"]["50.0 %"]["both"]["mean"] == 2  # seed 1 alone
    title = unstructured._draw(config, {"units": results}).get_suptitle()
    assert "2 seeds, FLS + SGD: 1, magnitude + FishLeg: 1;" in title
    table = tables._unstructured("x", found)["x"]
    assert "seeds: 2, of the arms that the paper has not: 1)" in table
    assert "| FLS + SGD | 63.00 |" in table


@pytest.mark.parametrize("arms", [("OBS + SGD",), configs.ARMS[:3]])
def test_fewer_arms_can_be_drawn(arms: tuple[str, ...]) -> None:
    config = replace(SMOKE, arms=arms, sparsities=(0.5, 0.75))
    rows = [{"sparsity": s, "before": 60.0, "after": None if s > 0.6 else 70.0} for s in config.sparsities]
    results = {f"{arm}, seed 0": {"rows": rows, "seconds": 1.0} for arm in arms}
    results["dense"] = {"curve": [{"loss": 1.0, "accuracy": 75.0}]}
    drawn = unstructured._draw(config, {"units": results})
    assert [axis.get_title() for axis in drawn.axes] == ["right after each pruning", "after the training"]
    assert all(len(axis.lines) == len(arms) + 1 for axis in drawn.axes)  # and the dense model's
    found = plain(unstructured.summary(config, results))
    assert "diverged" in tables._unstructured("x", found)["x"]


def test_a_diverged_arm_is_left_out_of_the_bars() -> None:
    good, bad = ({"50.0 %": {"mean": mean, "sem": 0.0}} for mean in (70.0, None))
    found = {"before": {"OBS + SGD": good, "FLS + SGD": bad}, "after": {"OBS + SGD": good, "FLS + SGD": bad}}
    figure = semi_structured._draw(SMOKE, {"summary": {**found, "dense": 75.0}})
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["OBS + SGD"]
    table = tables._semi_structured("x", {**found, "dense": 75.0, "seeds": 1})["x"].splitlines()
    assert table[0].endswith("| 2:4, pruned | 2:4, trained |")
    assert table[2:] == ["| OBS + SGD | 70.00 | 70.00 |", "| FLS + SGD | diverged | diverged |"]


def test_magnitude_brings_what_fishleg_learns_from() -> None:
    for preset, samples in (("ours", 256), ("paper", 100)):
        config = configs.Config(dataset="cifar10", preset=preset)
        surgery, _ = experiment.arm_options(config, "magnitude + FishLeg")
        assert (surgery["method"], surgery["compensation"]) == ("magnitude", "none")
        assert surgery["samples"] == samples


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("cifar10", ""),
        ("cifar10-obs16", ", the paper's hyperparameters, OBS from 16 gradients"),
        ("cifar10-short", ", dense model stopped early"),
    ],
)
def test_titles_tell_configurations_apart(name: str, told: str) -> None:
    assert unstructured.particulars(configs.load(name)) == told


def test_the_configured_classes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digits has 10 classes here, expected 9"):
        dense_model.load_data(replace(SMOKE, classes=9), None, print)


def test_an_unknown_device_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device 'gpu' cannot be used"):
        unstructured.run(tmp_path / "out", progress=print, device="gpu")
    assert not (tmp_path / "out").exists()


def test_a_file_with_the_name_of_a_packaged_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar10.toml").write_text('dataset = "digits"')
    with pytest.raises(ValueError, match="call it something else"):
        configs.load(str(tmp_path / "cifar10.toml"))
