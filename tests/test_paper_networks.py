"""The paper's ResNet18 experiments: configurations, the dense model, the arms, and each from end to end."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fishleg import FineTuning, SurgeonOptions
from fishleg.loop import Gradual
from fishleg.paper import config as configs
from fishleg.paper import resnet18, semi_structured, unstructured
from fishleg.surgeon import Surgeon
from fishleg.workloads.models import ResNet18

SMOKE = configs.load("smoke")


@pytest.mark.parametrize("module", [unstructured, semi_structured])
def test_smoke_runs_and_resumes(module, tmp_path: Path) -> None:
    said: list[str] = []
    record = module.run(tmp_path, smoke=True, progress=said.append)
    path = tmp_path / f"{module.NAME}-smoke.json"
    assert json.loads(path.read_text()) == record
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert set(record["units"]) == {"dense", *(f"{arm}, seed 0" for arm in configs.ARMS)}
    assert any("left" in line for line in said)
    targets = SMOKE.sparsities if module is unstructured else SMOKE.semi_structured
    for key, unit in record["units"].items():
        if key != "dense":
            assert [row["sparsity"] for row in unit["rows"]] == list(targets)
            assert all(0 <= row[when] <= 100 for row in unit["rows"] for when in ("before", "after"))

    # a run that was killed in its last part, with the dense model still there
    record["units"]["magnitude + FishLeg, seed 0"]["seconds"] = -1
    kept = {k: u for k, u in record["units"].items() if k != "magnitude + SGD, seed 0"}
    path.write_text(json.dumps({"settings": record["settings"], "units": kept}))
    said.clear()
    again = module.run(tmp_path, smoke=True, progress=said.append)
    assert not [line for line in said if "dense" in line]
    assert (
        again["units"]["magnitude + SGD, seed 0"]["rows"]
        == record["units"]["magnitude + SGD, seed 0"]["rows"]
    )
    assert again["units"]["magnitude + FishLeg, seed 0"]["seconds"] == -1  # it was kept as it was


def dense(tmp_path: Path, config: configs.Config = SMOKE) -> resnet18.Dense:
    return resnet18.Dense(config, resnet18.load_data(config, None, print), tmp_path, lambda _: None)


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
    again = half.model().state_dict()
    assert epochs == 2
    assert all(torch.equal(expected[key], again[key]) for key in expected)
    assert len(half.curve()) == SMOKE.dense_epochs


def test_a_dense_model_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    first = dense(tmp_path)
    first.model()
    other = dense(tmp_path, replace(SMOKE, dense_epochs=1))
    assert other._read() is None
    assert len(other.curve()) == 1


def test_resnet18_has_its_usual_size() -> None:
    def count(model: torch.nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    assert count(ResNet18()) == 11_173_962
    assert count(ResNet18(width=16)) == 701_466
    assert ResNet18(40, 4, stem_stride=2)(torch.randn(2, 3, 64, 64)).shape == (2, 40)


@pytest.mark.parametrize("name", configs.names())
def test_every_configuration_can_be_loaded_and_its_arms_built(name: str) -> None:
    config = configs.load(name)
    for arm in config.arms:
        surgery, tuning = resnet18.arm_options(config, arm)
        SurgeonOptions(**surgery)
        FineTuning(**tuning)
    if name.startswith("full"):
        assert (config.width, config.preset, config.device, config.seeds) == (64, "paper", "cuda", (0, 1, 2))
        assert config.batch_size == (2048 if "tiny" in name else 128)


def test_the_papers_preset_is_its_table() -> None:
    surgery, tuning = resnet18.paper_preset("cifar10")
    assert (tuning["lr"], tuning["weight_decay"], tuning["momentum"]) == (1e-3, 1e-5, 0.9)
    assert (surgery["gamma"], surgery["scale"], surgery["auxiliary"].lr) == (1e-3, 10, 1e-5)
    surgery, tuning = resnet18.paper_preset("tiny-imagenet")
    assert (tuning["lr"], tuning["weight_decay"], tuning["momentum"]) == (1e-2, 1e-5, 0.9)
    assert (surgery["gamma"], surgery["scale"], surgery["auxiliary"].lr) == (1.0, 1, 1e-6)
    for options in (resnet18.arm_options(replace(SMOKE, preset="paper"), arm)[1] for arm in configs.ARMS[:2]):
        assert options["lr"] == 1e-3


def test_the_papers_preset_takes_plain_steps_from_its_scale(tmp_path: Path) -> None:
    config = replace(SMOKE, preset="paper", dense_epochs=1)
    model, examples = dense(tmp_path, config).model(), resnet18.load_data(config, None, print)
    surgery, tuning = resnet18.arm_options(config, "FLS + FishLeg")
    surgery["samples"] = 24
    surgeon = Surgeon(model, examples.batches(config, 0), **surgery)
    run = Gradual(surgeon, None, FineTuning(**{**tuning, "steps": 2}))
    run.prune(0.5)
    for operator in map(surgeon.inverse.unmasked, surgeon.inverse.layers):
        torch.testing.assert_close(operator.diag(), torch.full_like(operator.diag(), 10.0), rtol=0.01, atol=0)
    list(run.train())
    assert run.optimizer.last_trust == 1
    assert run.optimizer.step_damping == 1
    assert run.optimizer.max_kl == math.inf
    assert surgeon.learning.steps == 6 + 2  # the warmup, then one with every training step


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("width = 3", "dataset is missing"),
        ('dataset = "cifar10"\nwidht = 3', "unknown: widht"),
        ('dataset = "mnist"', "dataset must be one of"),
        ('dataset = "cifar10"\npreset = "best"', "preset must be one of"),
        ('dataset = "cifar10"\narms = ["OBS"]', "arms must be some of"),
        ('dataset = "cifar10"\narms = []', "arms must be some of"),
        ('dataset = "cifar10"\nwidth = 0', "width must be a whole number >= 1, got 0"),
        ('dataset = "cifar10"\nwidth = "16"', "width must be a whole number >= 1, got '16'"),
        ('dataset = "cifar10"\nepochs = 0', "epochs must be a number > 0, got 0"),
        ('dataset = "cifar10"\nsparsities = [0.9, 0.5]', "0.5"),
        ('dataset = "cifar10"\nseeds = [0.5]', "seeds must be whole numbers"),
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
    assert (parts["scorer"]["mean"], parts["optimizer"]["mean"], parts["both"]["mean"]) == (7, 5, 12)
