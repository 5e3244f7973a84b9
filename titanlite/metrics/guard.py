"""The non-finite guard: a step whose loss or gradient norm is not finite changes nothing.

The decision is made on the device from two numbers that are equal on all ranks, so it costs no host
synchronisation and is the same everywhere. The host reads it one step later, to log the step and to end a run
that has diverged; by then the device refuses all further updates, so none slips through.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from titanlite.config.component import ConfigError
from titanlite.host_copy import HostCopy
from titanlite.log import logger


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What happens to a step whose loss or gradient norm is not finite."""

    skip_non_finite: bool = True
    """Skip the update of such a step: weights and optimizer state stay as they are, its sequences count as
    consumed. false: the first such step ends the run with exit code 4, without applying its update."""
    max_consecutive: int = 8
    """After this many skipped steps in a row the run ends with exit code 4: training has diverged."""

    def __post_init__(self) -> None:
        if self.max_consecutive < 1:
            raise ConfigError(f"{self.max_consecutive} is below 1", "max_consecutive")

    @property
    def limit(self) -> int:
        """Non-finite steps in a row at which the run ends."""
        return self.max_consecutive if self.skip_non_finite else 1


class _Decision(NamedTuple):
    """What the host has yet to read of one step. `values`: skipped (0 or 1), streak, loss, gradient norm."""

    step: int
    first_sequence: int
    last_sequence: int
    values: HostCopy


class StepGuard:
    """Judges each step, on the device. Its state is two integers: `streak`, how many of the newest steps in a
    row were skipped, and `skipped`, how many of all steps."""

    def __init__(self, config: Guard, device: torch.device):
        self.config = config
        self._streak = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._unread: deque[_Decision] = deque()
        self._last_streak: tuple[int, int] = (0, -1)  # first and last step of the newest streak known
        self.diverged = False

    def judge(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        bad_norms: torch.Tensor,
        step: int,
        first_sequence: int,
        num_sequences: int,
    ) -> torch.Tensor:
        """Whether to apply this step's update: bool scalar on the device; no host synchronisation.

        `loss`: of the whole step. `bad_norms`: on how many ranks the gradient norm is not finite; ranks with
        copies of a gradient may differ if one is damaged. Both are equal on all ranks, so the decision is.
        `grad_norm` and the sequences are for the log.
        """
        finite = loss.isfinite() & (bad_norms == 0)
        allowed = self._streak < self.config.limit  # once the limit is reached, no update is applied any more
        apply = finite & allowed
        streak = torch.where(finite, 0, self._streak + 1)
        self._streak = torch.where(allowed, streak, self._streak)
        self._skipped = self._skipped + (~apply)
        norm = torch.where(bad_norms == 0, grad_norm.to(loss), torch.nan)
        values = torch.stack([(~apply).float(), self._streak.float(), loss, norm])
        last = first_sequence + num_sequences - 1
        self._unread.append(_Decision(step, first_sequence, last, HostCopy(values)))
        return apply

    def read(self, leave: int = 0) -> list[int]:
        """Read the decisions on all steps but the newest `leave`. Returns and logs the steps that were
        skipped; sets `diverged` if as many in a row as the limit were. With `leave` = 1 this waits for no
        work that was just queued."""
        skipped_steps = []
        while len(self._unread) > leave:
            step, first, last, values = self._unread.popleft()
            skipped, streak, loss, grad_norm = values.result().tolist()
            if skipped and not self.diverged:
                logger.info(  # no warning: every rank would say it
                    f"step {step} is skipped: loss {loss:g}, gradient norm {grad_norm:g}; its sequences are "
                    f"{first} to {last} (skipped step {streak:.0f} in a row, the run ends at "
                    f"{self.config.limit})"
                )
                self._last_streak = (step - int(streak) + 1, step)
                self.diverged = streak >= self.config.limit
                skipped_steps.append(step)
        return skipped_steps

    def in_streak(self) -> bool:
        """Whether the newest step was skipped. Waits for the device."""
        return self._streak.item() > 0

    def ended_in_streak(self, step: int) -> bool:
        """Whether `step`, the newest one that read() or load_state_dict() knows of, was skipped."""
        first, last = self._last_streak
        return first <= last == step

    def skipped_steps(self) -> int:
        """Steps skipped since the run's first. Waits for the device."""
        return int(self._skipped.item())

    def reason(self) -> str:
        """Why the run ends, after read() has found that it has `diverged`, or ended in a streak."""
        first, last = self._last_streak
        steps = f"step {last}" if first == last else f"{last - first + 1} steps in a row, {first} to {last},"
        return f"training has diverged: {steps} had a loss or gradient norm that is not finite"

    def state_dict(self) -> dict[str, int]:
        """Plain numbers for train.json. Waits for the device."""
        return {"streak": int(self._streak.item()), "skipped_steps": self.skipped_steps()}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue from `state`, saved after `step`. A streak that had reached the limit has ended its run;
        who starts it again gets a new count."""
        streak = state["streak"] if state["streak"] < self.config.limit else 0
        self._streak.fill_(streak)
        self._skipped.fill_(state["skipped_steps"])
        self._last_streak = (step - state["streak"] + 1, step)
