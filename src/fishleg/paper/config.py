"""The settings of the ResNet18 experiments: from a TOML file, one's own or one that travels along."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from fishleg.patterns import check_sparsities
from fishleg.toml import read_toml

DATASETS = ("cifar10", "tiny-imagenet", "digits")
PRESETS = ("ours", "paper")
ARMS = ("magnitude + SGD", "OBS + SGD", "FLS + FishLeg", "FLS + SGD", "magnitude + FishLeg")
CONTROL = "magnitude + SGD, rate × 10"


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment. The defaults are those of the runs that docs/reproduction.md reports."""

    dataset: str
    width: int = 64  # of ResNet18
    stem_stride: int = 1
    batch_size: int = 128
    dense_epochs: int = 30
    dense_lr: float = 3e-3  # Adam's, at its highest
    preset: str = "ours"  # or "paper": its table of hyperparameters
    arms: tuple[str, ...] = ARMS
    # kept weights fall by the same factor each time, 95 % being the fifth of six
    sparsities: tuple[float, ...] = (0.4507, 0.6983, 0.8343, 0.909, 0.95, 0.9725)
    semi_structured: tuple[float, ...] = (0.25, 0.5)  # on the way to 2:4
    epochs: float = 1.0  # after each pruning step
    seeds: tuple[int, ...] = (0, 1, 2)
    samples: int = 192  # gradients for FLS's first Q
    obs_samples: int = 512  # gradients for each of OBS's
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, known in (("dataset", DATASETS), ("preset", PRESETS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        unknown = [arm for arm in self.arms if arm not in (*ARMS, CONTROL)]
        if unknown or not self.arms:
            raise ValueError(f"arms must be some of {', '.join((*ARMS, CONTROL))}, got {list(self.arms)}")
        for name in ("width", "stem_stride", "batch_size", "dense_epochs", "samples", "obs_samples"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {getattr(self, name)!r}")
        for name in ("dense_lr", "epochs"):
            if not isinstance(getattr(self, name), (int, float)) or not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be a number > 0, got {getattr(self, name)!r}")
        for name in ("sparsities", "semi_structured"):
            check_sparsities(list(getattr(self, name)))
        if not self.seeds or not all(isinstance(seed, int) for seed in self.seeds):
            raise ValueError(f"seeds must be whole numbers, got {list(self.seeds)}")

    def settings(self) -> dict[str, Any]:
        """What the results depend on; the seeds and arms that were run are in the results themselves."""
        return {k: v for k, v in asdict(self).items() if k not in ("arms", "seeds", "device")}

    def dense_settings(self) -> dict[str, Any]:
        """What the dense model depends on."""
        names = ("dataset", "width", "stem_stride", "batch_size", "dense_epochs", "dense_lr")
        return {name: getattr(self, name) for name in names}


def names() -> list[str]:
    """The configurations that travel with the package."""
    folder = resources.files("fishleg.paper").joinpath("configs")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load(name: str) -> Config:
    """The configuration of that name, or in that file."""
    path = Path(name)
    if name in names():
        folder = resources.files("fishleg.paper").joinpath("configs")
        text = folder.joinpath(f"{name}.toml").read_text("utf-8")
    elif path.is_file():
        text = path.read_text("utf-8")
    else:
        raise ValueError(f"config must be a TOML file or one of {', '.join(names())}; there is no {name}")
    try:
        values: dict[str, Any] = read_toml(text)
    except ValueError as error:
        raise ValueError(f"{name} is not TOML: {error}") from None
    known = {field.name for field in fields(Config)}
    if "dataset" not in values or (unknown := sorted(values.keys() - known)):
        wrong = "dataset is missing" if "dataset" not in values else f"unknown: {', '.join(unknown)}"
        raise ValueError(f"{name}: {wrong}; it may set {', '.join(sorted(known))}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Config(**values)
