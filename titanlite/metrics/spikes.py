"""The spike detector: finds a loss that rises and stays up for many steps.

It compares the median of the newest 16 accepted losses with the median of the 256 accepted before them. If
the first is higher by more than six standard deviations (by the median absolute deviation of the 256) and by
more than 0.1 nats, for 16 steps in a row, the loss has spiked. Medians ignore single high losses, which
outlier steps are for. A run has no spikes in its first 272 accepted steps, in which the loss falls fast.

The detector runs on the host, on losses that are equal on all ranks, and all ranks find the same spikes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

RECENT, BEFORE = 16, 256  # accepted losses whose medians are compared
MAX_DELAY = 2 * RECENT  # accepted steps from the first step of a spike until it is certain, at most
SIGMAS = 6.0
LEAST_HEIGHT = 0.1  # nats
MAD_TO_SIGMA = 1.4826  # standard deviation of normal noise / its median absolute deviation


@dataclass(frozen=True)
class Spike:
    """A rise of the loss that lasted."""

    start_step: int
    """The first step whose loss lay above the threshold, among the newest 16 when their median rose above it.
    About 8 steps with a high loss move the median."""
    detected_step: int
    """The step whose loss made it certain, usually 23 accepted steps later."""
    level: float
    """Median of the 256 losses before the rise."""
    height: float
    """Distance of the median of the newest 16 losses from `level` in nats, when the spike was detected."""

    def __str__(self) -> str:
        return (
            f"the loss has spiked by {self.height:.3g} nats: at step {self.start_step} it rose from "
            f"{self.level:.4g}, and it was still up at step {self.detected_step}"
        )


class SpikeDetector:
    """Takes the loss of each accepted step. The state is the newest losses, and how long they are high."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all losses: those that follow cannot be compared with them."""
        self._losses = deque[float](maxlen=BEFORE + RECENT)
        self._steps = deque[int](maxlen=RECENT)  # of the newest losses
        self._num_high = 0  # steps in a row, up to the newest, at which the newest losses are too high
        self._num_low = 0  # steps in a row at which they are not
        self._start_step, self._level = 0, 0.0  # of the rise; meaningful if _num_high > 0
        self._is_reported = False  # this rise was reported

    @property
    def is_high(self) -> bool:
        """Whether the newest losses are too high, so that a spike may have begun, or lasts."""
        return self._num_high > 0

    def add(self, step: int, loss: float) -> Spike | None:
        """Take the loss of an accepted step. Returns a spike at the step that makes it certain, and never the
        same one again: the loss must first have been down for 16 steps, or have been up for so long that the
        level before is a high one, too."""
        self._steps.append(step)
        self._losses.append(loss)
        if len(self._losses) < BEFORE + RECENT:
            return None
        level, threshold, now = self._compare()
        if now - level <= threshold:
            self._num_high, self._num_low = 0, self._num_low + 1
            self._is_reported = self._is_reported and self._num_low < RECENT
            return None
        self._num_high, self._num_low = self._num_high + 1, 0
        if self._num_high == 1:
            recent = list(self._losses)[BEFORE:]
            self._level = level
            self._start_step = next(s for s, x in zip(self._steps, recent) if x - level > threshold)
        if self._num_high < RECENT or self._is_reported:
            return None
        self._is_reported = True
        return Spike(self._start_step, step, self._level, now - self._level)

    def _compare(self) -> tuple[float, float, float]:
        """The median of the losses before the newest ones, the largest distance from it that is no spike, and
        the median of the newest losses."""
        losses = list(self._losses)
        before, recent = losses[:BEFORE], losses[BEFORE:]
        level, now = median(before), median(recent)
        if now - level <= LEAST_HEIGHT:  # almost always
            return level, LEAST_HEIGHT, now
        deviation = median(abs(loss - level) for loss in before)
        return level, max(SIGMAS * MAD_TO_SIGMA * deviation, LEAST_HEIGHT), now

    def state_dict(self) -> dict[str, Any]:
        """Plain values for train.json."""
        return {
            "losses": list(self._losses),
            "steps": list(self._steps),
            "num_high": self._num_high,
            "num_low": self._num_low,
            "start_step": self._start_step,
            "level": self._level,
            "is_reported": self._is_reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._steps.clear()
        self._steps.extend(state["steps"])
        self._num_high, self._num_low = state["num_high"], state["num_low"]
        self._start_step, self._level = state["start_step"], state["level"]
        self._is_reported = state["is_reported"]
