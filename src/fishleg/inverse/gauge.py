"""The convergence gauge of the auxiliary loss, and its smoothed form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AuxiliaryStats:
    """The result of one auxiliary step: the loss, and gauges that tend to 0 as Q tends to (F+γI)⁻¹.

    Attributes:
        step: The number of the step, from 1.
        loss: An estimate of ½Tr(QF_γQ) − Tr(Q). The estimator `probe` divides it by the number of parameters.
        gauge: An estimate of Tr(QF_γQ)/Tr(Q) − 1, the convergence check of the paper, relative to Tr(Q).
        gauge_smoothed: The exponential average of the gauge.
        converged: Whether the smoothed gauge is small and the smoothed loss no longer falls.
    """

    step: int
    loss: float
    gauge: float
    gauge_smoothed: float
    converged: bool


@dataclass
class SmoothedGauge:
    """Bias-corrected exponential averages: of the gauge, and of the loss with a fast and a slow decay.

    Attributes:
        decay: The weight of the past in the averages of the gauge and of the fast loss, in [0, 1).
        count: The number of updates.
        gauge: The average of the gauge, before the bias correction.
        fast: The fast average of the loss, before the bias correction.
        slow: The slow average of the loss, before the bias correction. It is four times as slow.
    """

    decay: float
    count: int = 0
    gauge: float = 0.0
    fast: float = 0.0
    slow: float = 0.0

    def update(self, gauge: float, loss: float) -> tuple[float, float]:
        """Add one measurement.

        Args:
            gauge: The gauge of this step.
            loss: The auxiliary loss of this step.

        Returns:
            The smoothed gauge, and the relative difference of the fast and the slow average of the loss.
        """
        self.count += 1
        slow_decay = 1 - (1 - self.decay) / 4
        self.gauge = self.decay * self.gauge + (1 - self.decay) * gauge
        self.fast = self.decay * self.fast + (1 - self.decay) * loss
        self.slow = slow_decay * self.slow + (1 - slow_decay) * loss
        correction = 1 - self.decay**self.count
        fast, slow = self.fast / correction, self.slow / (1 - slow_decay**self.count)
        change = abs(fast - slow) / max(abs(slow), 1e-30)
        return self.gauge / correction, change
