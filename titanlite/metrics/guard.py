"""The non-finite guard: a step whose loss or gradient norm is not finite changes neither weights nor
optimizer state.

The device decides, from two numbers that are equal on all ranks: no host synchronisation is needed, and all
ranks decide alike. The host reads the decision one step later, to log it and to end a run that has diverged.
In the meantime the device refuses all further updates.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from titanlite.config.component import check_at_least
from titanlite.host_copy import HostCopy
from titanlite.log import logger


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The reaction to a step whose loss or gradient norm is not finite."""

    skip_non_finite: bool = True
    """true: skip the update of such a step. Weights and optimizer state stay as they are, and the sequences
    of the step count as consumed. false: the first such step ends the run with exit code 4; its update is
    not applied."""
    max_consecutive: int = 8
    """Number of skipped steps in a row after which the run ends with exit code 4, because training has
    diverged."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_consecutive")

    @property
    def limit(self) -> int:
        """Non-finite steps in a row at which the run ends."""
        return self.max_consecutive if self.skip_non_finite else 1


class _Decision(NamedTuple):
    """The device's decision on one step, not yet read by the host. `values`: skipped (0 or 1), streak, loss,
    gradient norm."""

    step: int
    first_sequence: int
    last_sequence: int
    values: HostCopy


class StepGuard:
    """Judges each step on the device. The state is two integers: the streak, which is the number of skipped
    steps in a row up to the newest step, and the number of all skipped steps."""

    def __init__(self, config: Guard, device: torch.device):
        self.config = config
        self._streak = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._unread: deque[_Decision] = deque()
        self._last_streak: tuple[int, int] | None = None  # first and last step of the newest streak known
        self.diverged = False

    def judge(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        bad_norms: torch.Tensor,
        step: int,
        first_sequence: int,
        next_sequence: int,
    ) -> torch.Tensor:
        """Whether to apply this step's update: bool scalar on the device; no host synchronisation.

        `loss`: loss of the whole step. `bad_norms`: number of ranks whose gradient norm is not finite; ranks
        with copies of one gradient differ if a copy is damaged. Both are equal on all ranks, and so is the
        decision. `grad_norm` is for the log, and so are `first_sequence` and `next_sequence`: the step's
        sequences are the sequences from `first_sequence` to before `next_sequence`.
        """
        finite = loss.isfinite() & (bad_norms == 0)
        allowed = self._streak < self.config.limit  # at the limit, no update is applied any more
        apply = finite & allowed
        streak = torch.where(finite, 0, self._streak + 1)
        self._streak = torch.where(allowed, streak, self._streak)
        self._skipped = self._skipped + (~apply)
        norm = torch.where(bad_norms == 0, grad_norm.to(loss), torch.nan)
        values = torch.stack([(~apply).float(), self._streak.float(), loss, norm])
        self._unread.append(_Decision(step, first_sequence, next_sequence - 1, HostCopy(values)))
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
                logger.info(  # not a warning, which every rank would log
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
        """Whether `step` was skipped. It must be the newest step that read() or load_state_dict() knows."""
        return self._last_streak is not None and self._last_streak[1] == step

    def skipped_steps(self) -> int:
        """Number of steps skipped since the beginning of the run. Waits for the device."""
        return int(self._skipped.item())

    def reason(self) -> str:
        """Why the run ends, if it has diverged or its last step was skipped."""
        assert self._last_streak is not None
        first, last = self._last_streak
        steps = f"step {last}" if first == last else f"{last - first + 1} steps in a row, {first} to {last},"
        return f"training has diverged: {steps} had a loss or gradient norm that is not finite"

    def state_dict(self) -> dict[str, int]:
        """Plain numbers for train.json. Waits for the device."""
        return {"streak": int(self._streak.item()), "skipped_steps": self.skipped_steps()}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Continue from `state`, saved after `step`. A streak at the limit has ended the run that saved it,
        and is counted anew."""
        streak = state["streak"] if state["streak"] < self.config.limit else 0
        self._streak.fill_(streak)
        self._skipped.fill_(state["skipped_steps"])
        self._last_streak = (step - state["streak"] + 1, step) if state["streak"] else None
