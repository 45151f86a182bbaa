"""What a run on disk needs beside the pruning itself: model, data, schedule, directory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fishleg.options.declaration import NOT_EMPTY, OptionError, check_fields, option
from fishleg.options.names import LIKELIHOODS, MODES, SCHEDULES

BUDGETS = ("sparsity", "sparsities", "max_drop", "max_params", "max_flops")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Where the model comes from."""

    model: str = option(
        "", "Function that returns the model: net.py:make, package.module:make, or workload:digits."
    )
    weights: str | None = option(None, "State dict to load into the model: a .safetensors or .pt file.")
    likelihood: str = option(
        "categorical",
        "Distribution of the outputs. categorical: classes; gaussian: real numbers; bernoulli: yes or no.",
        choices=LIKELIHOODS,
    )
    forward: str | None = option(
        None, "Function (model, batch) -> outputs; default: the model is called on the inputs."
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where the data come from."""

    data: str | None = option(
        None, "Function that returns the calibration loader, e.g. data.py:loader; labels are not needed."
    )
    train_data: str | None = option(
        None, "Function that returns the training loader (mode gradual); default: the loader of data."
    )
    eval_data: str | None = option(
        None, "Function that returns the loader for evaluation; default: the first batches of data."
    )
    metric: str | None = option(
        None, "Function (model, loader) -> number, larger is better; default: accuracy, or the loss."
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """How sparse the model becomes, and in which stages."""

    sparsity: float | None = option(
        None,
        "Share of the prunable weights (with pattern rows: of the rows) to remove, 0.9 or 90%; "
        "default: 1 - N/M for an N:M pattern, else 0.9.",
        rule="(0, 1)",
        flags=("-s",),
        share=True,
    )
    sparsities: Sequence[float] = option(
        (), "Instead of sparsity: the sparsity after each stage.", share=True
    )
    max_drop: str | float | None = option(
        None,
        "Instead of sparsity: find the largest one at which the metric drops by at most this, 0.01 or 1%.",
    )
    max_params: int | None = option(
        None, "Instead of sparsity: the largest number of parameters to keep.", rule=">= 1"
    )
    max_flops: str | float | None = option(
        None, "Instead of sparsity: the largest number of multiply-adds per example, or a share, 0.4 or 40%."
    )
    mode: str = option(
        "staged",
        "staged: several stages; one-shot: one stage; gradual: several, with training after each.",
        choices=MODES,
    )
    stages: int | None = option(
        None,
        "Number of stages; default: as many as needed so that each keeps 75 % (rows without training: 95 %).",
        rule=">= 1",
    )
    schedule: str = option("exponential", "How the sparsity rises from stage to stage.", choices=SCHEDULES)

    def __post_init__(self) -> None:
        check_fields(self)
        given = [name for name in BUDGETS if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise OptionError(f"give one of {', '.join(BUDGETS)}, got {' and '.join(given)}")
        for name in ("max_drop", "max_flops"):
            if getattr(self, name) is not None:
                amount(name, getattr(self, name))
        if self.sparsities and self.stages is not None:
            raise OptionError("sparsities is the schedule itself: leave out stages")
        if self.sparsities and self.mode == "one-shot":
            raise OptionError("sparsities is a schedule of stages: leave out mode = 'one-shot'")
        if self.mode == "one-shot" and self.stages not in (None, 1):
            raise OptionError(f"mode 'one-shot' is a single stage, got stages = {self.stages}")
        if self.mode == "one-shot" and self.schedule != "exponential":
            raise OptionError(f"mode 'one-shot' is a single stage, got schedule = {self.schedule!r}")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Directory, seed and machine of a run."""

    out: str = option(
        "fishleg-run", "Directory for everything that the run writes.", rule=NOT_EMPTY, flags=("-o",)
    )
    seed: int = option(0, "Seed of all random numbers.", rule="[0, 4294967296)")
    device: str = option("auto", "Device: auto, cpu, cuda, cuda:1 ...", rule=NOT_EMPTY)
    threads: int | None = option(None, "Number of CPU threads; default: as torch chooses.", rule="[1, 1024]")
    checkpoint_minutes: float = option(5.0, "Minutes between checkpoints while training.", rule="> 0")
    keep: int = option(3, "Number of checkpoints to keep.", rule=">= 1")
    tensorboard: bool = option(False, "Log to TensorBoard too (needs tensorboard).")
    wandb: str | None = option(None, "Log to this Weights & Biases project too (needs wandb).")

    def __post_init__(self) -> None:
        check_fields(self)


def amount(name: str, value: str | float) -> tuple[float, bool]:
    """Read a budget such as `1%`, 0.01 or 12000000. A number below 1 is a share.

    Args:
        name: The option, for messages; `max_drop` is always a share.
        value: What was given.

    Returns:
        The number, and whether it is a share.

    Raises:
        OptionError: It is no number, not positive, or a share of 1 or more.
    """
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise OptionError(f"{name} must be a number or a percentage such as 1%, got {value!r}") from None
    number = number / 100 if text.endswith("%") else number
    relative = text.endswith("%") or name == "max_drop" or 0 < number < 1
    hint = f"; for {text} % write {text}%" if not text.endswith("%") and 1 <= number < 100 else ""
    if name == "max_flops" and hint:  # no network has so few
        raise OptionError(f"max_flops must be a number >= 100 or a share, got {value!r}{hint}")
    if not (math.isfinite(number) and number > 0) or (relative and number >= 1):
        rule = "in (0 %, 100 %)" if relative else "> 0"
        raise OptionError(f"{name} must be {rule}, got {value!r}{hint}")
    return number, relative
