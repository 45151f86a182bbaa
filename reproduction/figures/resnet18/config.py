"""The settings of the ResNet18 experiments, from a TOML file in reproduction/configs or of the user."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fishleg.formats.toml import read_toml
from fishleg.pruning.schedules import check_sparsities

CONFIGS = Path(__file__).parents[2] / "configs"
DATASETS = ("cifar10", "tiny-imagenet", "digits")
PRESETS = ("ours", "paper")
DENSE_RATES = ("one cycle", "constant")
ARMS = ("magnitude + SGD", "OBS + SGD", "FLS + FishLeg", "FLS + SGD", "magnitude + FishLeg")
CONTROL = "dense + SGD"  # a control: trained, BatchNorm statistics refreshed, nothing removed
VERSION = 3  # of the arms; results of other versions are not mixed with these
# the runs that docs/reproduction.md reports of each dataset
REPORTED = {
    "cifar10": [
        ("unstructured", "cifar10"),
        ("semi_structured", "cifar10"),
        ("semi_structured", "cifar10-crossed"),
        ("semi_structured", "cifar10-preset"),
        ("unstructured", "cifar10-preset"),
        ("unstructured", "cifar10-obs16"),
        ("unstructured", "cifar10-short"),
        ("semi_structured", "cifar10-short"),
    ],
    "tiny-imagenet": [
        ("unstructured", "tiny-imagenet"),
        ("semi_structured", "tiny-imagenet"),
        ("unstructured", "tiny-imagenet-obs16"),
        ("unstructured", "tiny-imagenet-preset"),
        ("semi_structured", "tiny-imagenet-preset"),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment. The defaults are those of the runs that docs/reproduction.md reports."""

    dataset: str
    classes: int | tuple[str, ...] = 10  # the expected number, or the names of the classes to use
    width: int = 64  # of ResNet18
    stem_stride: int = 1
    batch_size: int = 128
    dense_epochs: int = 30
    dense_lr: float = 3e-3  # the highest rate of Adam
    dense_rate: str = "one cycle"  # falls to zero at the end; or "constant"
    preset: str = "ours"  # or "paper": the hyperparameters of its table
    arms: tuple[str, ...] = ARMS
    # kept weights fall by the same factor each time, 95 % is the third of four
    sparsities: tuple[float, ...] = (0.6316, 0.8643, 0.95, 0.9816)
    semi_structured_arms: tuple[str, ...] = ARMS[:3]
    semi_structured: tuple[float, ...] = (0.293, 0.5)  # to 2:4, by the same factor each time
    epochs: float = 1.0  # after each pruning step
    seeds: tuple[int, ...] = (0, 1, 2)
    crossed_seeds: tuple[int, ...] = ()  # of the arms that the paper does not have; default: the same
    samples: int = 192  # gradients for FLS's first Q
    fishleg_samples: int = 256  # gradients for FishLeg's Q, if the scorer has none
    refine: int = 24  # auxiliary steps before each cut, with the preset "ours"
    obs_samples: int = 512  # gradients for each Q of OBS
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, known in (("dataset", DATASETS), ("preset", PRESETS), ("dense_rate", DENSE_RATES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("arms", "semi_structured_arms"):
            self._list_of(name, str, "names")
            if not set(getattr(self, name)) <= {*ARMS, CONTROL}:
                rule = f"must be some of {', '.join((*ARMS, CONTROL))}"
                raise ValueError(f"{name} {rule}, got {list(getattr(self, name))}")
        if isinstance(self.classes, tuple):
            self._list_of("classes", str, "names")
        whole = ("width", "stem_stride", "batch_size", "dense_epochs", "samples", "fishleg_samples", "refine",
                 "obs_samples")  # fmt: skip
        for name in (*whole, *(() if isinstance(self.classes, tuple) else ("classes",))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if self.width < 8:
            # torch 2.13: the gradient of strided 1×1 convolutions, channels last, writes out of bounds on
            # processors without AVX-512
            raise ValueError(f"width must be >= 8, narrower networks crash some processors, got {self.width}")
        for name in ("dense_lr", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e6:
                raise ValueError(f"{name} must be a number > 0, got {value!r}")
        self._list_of("seeds", int, "whole numbers")
        if self.crossed_seeds != ():
            self._list_of("crossed_seeds", int, "whole numbers")
            if not set(self.crossed_seeds) <= set(self.seeds):
                seeds, crossed = list(self.seeds), list(self.crossed_seeds)
                raise ValueError(f"crossed_seeds must be some of the seeds {seeds}, got {crossed}")
        for name in ("sparsities", "semi_structured"):
            self._list_of(name, (int, float), "numbers")
            check_sparsities(list(getattr(self, name)))
        if self.semi_structured[-1] != 0.5:
            raise ValueError(
                f"semi_structured must end with 0.5, which is 2:4, got {list(self.semi_structured)}"
            )

    def _list_of(self, name: str, kind: Any, what: str) -> None:
        value = getattr(self, name)
        right = isinstance(value, tuple) and all(
            isinstance(x, kind) and not isinstance(x, bool) for x in value
        )
        if not right or not value or len(set(value)) < len(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{name} must be a list of {what}, no two the same, got {shown!r}")

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """The seeds of an arm."""
        return self.crossed_seeds or self.seeds if arm in ARMS[3:] else self.seeds

    def settings(self, schedule: str) -> dict[str, Any]:
        """The settings on which results depend; arms and seeds may be added later."""
        runs = {"arms", "semi_structured_arms", "seeds", "crossed_seeds"}
        apart = runs | {"device", "sparsities", "semi_structured"}
        values = {key: value for key, value in asdict(self).items() if key not in apart - {schedule}}
        return {**self._but_usual(values), "version": VERSION}

    def dense_settings(self) -> dict[str, Any]:
        """The settings on which the dense model depends."""
        names = ("dataset", "classes", "width", "stem_stride", "batch_size", "dense_epochs", "dense_lr")
        return self._but_usual({name: getattr(self, name) for name in (*names, "dense_rate")})

    def _but_usual(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without newer settings that have the value of the oldest results, whose files do not name them."""
        newer = {"dense_rate": "one cycle", "refine": 24, "fishleg_samples": 256}
        return {key: value for key, value in values.items() if newer.get(key) != value}


def names() -> list[str]:
    """The configurations in reproduction/configs."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def load(name: str, **changes: Any) -> Config:
    """The configuration of that name, or in that file, with changes."""
    values, base = _values(name), None
    while "extends" in values:
        seen, base = base, values.pop("extends")
        if base not in names() or base == seen:
            raise ValueError(f"{name}: extends must be one of {', '.join(names())}, got {base!r}")
        below = _values(base)
        if "seeds" in values and "crossed_seeds" not in values:
            below.pop("crossed_seeds", None)  # they belong to the seeds that were replaced
        values = {**below, **values}
    known = {field.name for field in fields(Config)}
    if "dataset" not in values or (unknown := sorted(values.keys() - known)):
        wrong = "dataset is missing" if "dataset" not in values else f"unknown: {', '.join(unknown)}"
        raise ValueError(f"{name}: {wrong}; it may set extends, {', '.join(sorted(known))}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Config(**{**values, **changes})


def _values(name: str) -> dict[str, Any]:
    """The content of the file."""
    path = Path(name)
    if name in names():
        text = (CONFIGS / f"{name}.toml").read_text("utf-8")
    elif path.is_file():
        if path.stem in names():
            raise ValueError(
                f"{name} has the name of a configuration in reproduction/configs: call it something else"
            )
        text = path.read_text("utf-8")
    else:
        raise ValueError(f"config must be a TOML file or one of {', '.join(names())}; there is no {name}")
    try:
        values: dict[str, Any] = read_toml(text)
    except ValueError as error:
        raise ValueError(f"{name} is not TOML: {error}") from None
    return values
