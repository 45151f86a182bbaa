"""What a pruning session reports: one event for everything that has happened."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PruneStep:
    """What one pruning step did.

    Args:
        target: The sparsity that was asked for.
        sparsity: The sparsity that was reached.
        removed: How many weights were removed in this step.
        predicted: The loss increase of the quadratic model, summed over layers: the KL divergence of the
            outputs from those of the model before the step.
        measured: That divergence on a few batches, after the refresh of BatchNorm; None if not measured.
        gamma: The damping of Q.
        per_layer: The sparsity of each weight.
    """

    target: float
    sparsity: float
    removed: int
    predicted: float
    measured: float | None
    gamma: float
    per_layer: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has happened in a session.

    Args:
        stage: The number of the stage, from 1.
        stages: How many stages there are; None where that is not known.
    """

    stage: int = 0
    stages: int | None = None

    @property
    def place(self) -> str:
        """The stage as text, for instance `[2/8]`."""
        return f"[{self.stage}]" if self.stages is None else f"[{self.stage}/{self.stages}]"

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class StageStarted(Event):
    """A stage begins; Q is about to be brought up to date.

    Args:
        target: The sparsity after the stage.
        update: What happens to Q: `estimate`, `refine` or `reuse`.
    """

    target: float
    update: str


@dataclass(frozen=True, kw_only=True)
class InverseUpdated(Event):
    """Q is up to date with the model.

    Args:
        update: What happened to it: `estimate`, `refine` or `reuse`.
    """

    update: str


@dataclass(frozen=True, kw_only=True)
class Pruned(Event):
    """Weights were removed and the others compensated.

    Args:
        step: What the pruning step did.
        predicts: Whether Q is a model of the loss. It is not for magnitude pruning, where Q = I.
    """

    step: PruneStep
    predicts: bool = True

    def __str__(self) -> str:
        known = [f"predicted {self.step.predicted:.3g}"] * self.predicts
        known += [] if self.step.measured is None else [f"measured {self.step.measured:.3g}"]
        increase = f": loss increase {', '.join(known)}" if known else ""
        return f"{self.place} sparsity {self.step.sparsity:.1%}{increase}"


@dataclass(frozen=True, kw_only=True)
class TrainingStep(Event):
    """One step of fine-tuning.

    Args:
        step: The number of the step in its stage, from 1.
        steps: How many there are in the stage.
        loss: The training loss.
        lr: The learning rate.
    """

    step: int
    steps: int
    loss: float
    lr: float

    def __str__(self) -> str:
        if self.step not in (1, self.steps) and self.step % 100:
            return ""
        return f"{self.place} step {self.step}/{self.steps}: training loss {self.loss:.4f}"


@dataclass(frozen=True, kw_only=True)
class StageDone(Event):
    """A stage has ended, with its fine-tuning if there is any.

    Args:
        step: What its pruning step did.
    """

    step: PruneStep


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """All stages are done.

    Args:
        sparsity: The fraction of the prunable weights (or rows) that is removed.
        unit: What sparsity counts, `weights` or `rows`.
        divergence: The KL divergence of the outputs from those of the dense model on the first batches;
            None if it was not measured.
        predicted: The sum of the predicted loss increases of all steps; None where the method does not
            predict, or where the model was trained between the steps.
        verdict: The text of the warning that the divergence is far above what was predicted for all steps
            together; None: there is none.
    """

    sparsity: float
    unit: str
    divergence: float | None
    predicted: float | None = None
    verdict: str | None = None

    def __str__(self) -> str:
        what = "rows" if self.unit == "rows" else "prunable weights"
        kl = (
            ""
            if self.divergence is None
            else f"; KL to the dense model's outputs {self.divergence:.3g} on the first batches"
        )
        return f"done: {self.sparsity:.1%} of the {what} removed{kl}"
