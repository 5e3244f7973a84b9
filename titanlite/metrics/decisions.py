"""The guard's decisions as the host reads them: the decision on each step, and the sequences of each step."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanlite.metrics.outliers import Evidence


@dataclass(frozen=True)
class Decision:
    """The device's decision on one step, as the host has read it."""

    step: int
    first_sequence: int
    last_sequence: int
    skipped: bool
    is_empty: bool
    """Whether the step has no target that counts. It is then not applied, but is no skipped step."""
    streak: int
    """Non-finite steps in a row up to this step, not counting steps without a target."""
    loss: float
    grad_norm: float
    evidence: Evidence | None
    """None if outliers are not looked for."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def restarted(self) -> bool:
        """Whether this outlier was applied, because too many in a row had been skipped."""
        return self.evidence is not None and self.evidence.restarted > 0

    def describe(self, limit: int, sigma: float) -> str:
        """The log line of a step that was skipped, or of an outlier that was applied. `limit`: non-finite
        steps in a row at which the run ends. `sigma`: standard deviations above which a step is an
        outlier."""
        sequences = f"its sequences are {self.first_sequence} to {self.last_sequence}"
        if not self.is_finite:
            return (
                f"step {self.step} is skipped: loss {self.loss:g}, gradient norm {self.grad_norm:g}; "
                f"{sequences} (skipped step {self.streak} in a row, the run ends at {limit})"
            )
        assert self.evidence is not None
        reasons = "; ".join(self._reasons(self.evidence, sigma))
        if self.restarted:
            return (
                f"step {self.step} is an outlier and is applied, because too many in a row were skipped: "
                f"{reasons}; {sequences}; the next steps are compared with the steps from this one on"
            )
        streak = f"outlier {self.evidence.streak:.0f} in a row"
        return f"step {self.step} is skipped: {reasons}; {sequences} ({streak})"

    def _reasons(self, evidence: Evidence, sigma: float) -> list[str]:
        numbers = [
            ("loss", self.loss, evidence.loss_sigmas, evidence.loss_median),
            ("gradient norm", self.grad_norm, evidence.log_norm_sigmas, math.exp(evidence.log_norm_median)),
        ]
        return [
            f"{name} {value:.4g} is {sigmas:.1f} standard deviations above the median {median:.4g}"
            for name, value, sigmas, median in numbers
            if sigmas > sigma
        ]

    def about(self) -> dict[str, Any]:
        """The numbers of the decision on an outlier or a step that is not finite, for sinks."""
        about: dict[str, Any] = {
            "reason": "outlier" if self.is_finite else "not finite",
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "first_sequence": self.first_sequence,
            "last_sequence": self.last_sequence,
        }
        if self.is_finite and self.evidence is not None:
            about |= {
                "loss_median": self.evidence.loss_median,
                "loss_sigmas": self.evidence.loss_sigmas,
                "grad_norm_median": math.exp(self.evidence.log_norm_median),
                "log_norm_sigmas": self.evidence.log_norm_sigmas,
            }
        return about


class _Stretch(NamedTuple):
    """Steps from `step` on that take `num_sequences` sequences each, the first of them from `first_sequence`
    on."""

    step: int
    first_sequence: int
    num_sequences: int

    def first_of(self, step: int) -> int:
        """The first sequence of a step."""
        return self.first_sequence + (step - self.step) * self.num_sequences


class StepSequences:
    """The sequences of each step that the run has taken. Steps in a row that take equally many sequences are
    one entry, so that the whole history of a run is a few numbers."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []

    def add(self, step: int, first_sequence: int, next_sequence: int) -> None:
        """Take the newest step and its sequences, from `first_sequence` to before `next_sequence`."""
        new = _Stretch(step, first_sequence, next_sequence - first_sequence)
        last = self._stretches[-1] if self._stretches else None
        if last is None or last.num_sequences != new.num_sequences or last.first_of(step) != first_sequence:
            self._stretches.append(new)

    def between(self, first_step: int, last_step: int) -> tuple[int, int]:
        """The first sequence of one step and the last sequence of another. A step before the first one that
        is known counts as that one."""
        first_step = max(first_step, self._stretches[0].step)
        first, last = self._stretch_of(first_step), self._stretch_of(last_step)
        return first.first_of(first_step), last.first_of(last_step + 1) - 1

    def _stretch_of(self, step: int) -> _Stretch:
        at = bisect_right(self._stretches, step, key=lambda stretch: stretch.step)
        return self._stretches[max(at - 1, 0)]

    def state_dict(self) -> list[list[int]]:
        """Plain numbers for train.json: of each stretch of steps, the first step, its first sequence and the
        number of sequences per step."""
        return [list(stretch) for stretch in self._stretches]

    def load_state_dict(self, state: list[list[int]]) -> None:
        """Continue from a state."""
        self._stretches = [_Stretch(*numbers) for numbers in state]
