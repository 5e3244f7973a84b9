"""The guard: decides which steps change nothing, and watches for spikes of the loss.

A step whose loss or gradient norm is not finite changes neither weights nor optimizer state, and neither does
an outlier (outliers.py), nor a step without a target that counts. The device decides, from numbers that are
equal on all ranks: no host synchronisation is needed, and all ranks decide alike. The host reads each
decision one step later, to log it, to pass the losses of accepted steps to the spike detector (spikes.py),
and to end a run that has diverged. In the meantime the device refuses all further updates of such a run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch

from titanlite.config.amount import Interval
from titanlite.config.component import ConfigError, check_at_least
from titanlite.host_copy import HostCopy
from titanlite.log import logger
from titanlite.metrics.decisions import Decision, StepSequences
from titanlite.metrics.outliers import NO_OUTLIERS, Evidence, Outliers
from titanlite.metrics.sinks.base import Event
from titanlite.metrics.spikes import MAX_DELAY, Spike, SpikeDetector

MAX_WINDOW = 10_000  # each checkpoint holds the window


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Reaction to steps that are not finite, to outliers and to spikes (docs/numerics.md)."""

    skip_non_finite: bool = True
    """Skip the update of a step whose loss or gradient norm is not finite. false: such a step ends the run
    with exit code 4."""
    skip_sigma: float = 0.0
    """Also skip outliers: loss or logarithm of the gradient norm more than this many standard deviations
    above the median of accepted steps. 6 skips almost no normal step. 0: off."""
    window: int = 128
    """Newest accepted steps that skip_sigma compares with. skip_sigma applies after 64 accepted steps, or
    after `window` of them if that is fewer."""
    max_consecutive: int = 8
    """Steps in a row that are not finite, after which the run ends with exit code 4; after as many outliers,
    the next step is applied."""
    on_spike: Literal["log", "stop", "rewind"] = "log"
    """Reaction to a spike, a loss that rises and stays up: `log` it; `stop` the run with exit code 4; or
    `rewind` to an earlier checkpoint (without one: stop), and skip the spike's sequences for good."""
    rewind_margin: int = 100
    """A rewind goes to the newest healthy checkpoint at least this many steps older than the spike."""
    max_rewinds: int = 3
    """Rewinds of a run; the next spike ends it with exit code 4."""
    fault_check_freq: Interval = 0
    """Steps between checks for GPUs that compute wrong numbers without an error: all ranks compute the same
    micro-batch, and a difference of one bit ends the run with exit code 6. Needs training.deterministic. 0:
    none; otherwise also at the run's last step."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "window", "max_consecutive")
        if not 0 <= self.skip_sigma < math.inf:
            raise ConfigError(f"{self.skip_sigma} is not a finite number of at least 0", "skip_sigma")
        if self.window > MAX_WINDOW:
            raise ConfigError(f"{self.window} is above {MAX_WINDOW}", "window")
        check_at_least(self, 1, "rewind_margin")  # the first step of the spike is after the checkpoint
        check_at_least(self, 0, "max_rewinds", "fault_check_freq")

    @property
    def limit(self) -> int:
        """Non-finite steps in a row at which the run ends."""
        return self.max_consecutive if self.skip_non_finite else 1

    @property
    def rewind_distance(self) -> int | None:
        """How many steps older than the newest step a checkpoint has to be for the run to go back to it after
        a spike that was just detected; None if a spike is only logged."""
        if self.on_spike == "log":
            return None
        return MAX_DELAY + (self.rewind_margin if self.on_spike == "rewind" else 2)

    def fault_check_is_due(self, step: int, last_step: int) -> bool:
        """Whether a check for silent faults is due after `step`."""
        freq = self.fault_check_freq
        return freq > 0 and (step == last_step or step % freq == 0)

    def fault_check_before(self, step: int) -> int:
        """The last step before `step` after which a check for silent faults was due; 0 if there is none."""
        return (step - 1) // self.fault_check_freq * self.fault_check_freq

    def check(self, saves_checkpoints: bool, is_deterministic: bool) -> None:
        """Raises ConfigError for a rewind without checkpoints, and for checks for silent faults without
        deterministic kernels."""
        if self.fault_check_freq and not is_deterministic:
            raise ConfigError(
                "ranks that compute the same have equal bits only with deterministic kernels: set "
                "training.deterministic = true",
                "guard.fault_check_freq",
            )
        if self.on_spike == "rewind" and not saves_checkpoints:
            raise ConfigError(
                "a rewind goes back to a checkpoint, and checkpoint.enable = false saves none",
                "guard.on_spike",
            )


class GuardEvent(NamedTuple):
    """An event for the sinks."""

    step: int
    event: Event
    about: dict[str, Any]


class _Unread(NamedTuple):
    """The device's decision on one step, not yet read by the host. `values`: skipped (0 or 1), without a
    target (0 or 1), streak, loss, gradient norm, and the values of Evidence if outliers are looked for.
    `is_other_loss`: whether the loss cannot be compared with the losses of the steps before."""

    step: int
    first_sequence: int
    last_sequence: int
    is_other_loss: bool
    values: HostCopy

    def read(self) -> Decision:
        """The decision. Waits for the device."""
        skipped, is_empty, streak, loss, grad_norm, *evidence = self.values.result().tolist()
        return Decision(
            self.step,
            self.first_sequence,
            self.last_sequence,
            bool(skipped),
            bool(is_empty),
            int(streak),
            loss,
            grad_norm,
            Evidence(*evidence) if evidence else None,
        )


class _Streak(NamedTuple):
    """The first and last non-finite step of a streak, and the number of such steps. Steps without a target
    may lie between them and after them."""

    first: int
    last: int
    num: int


class StepGuard:
    """Judges each step on the device, and reads the decisions on the host. The state: the streak, which is
    the number of non-finite steps in a row up to the newest step; the number of all skipped steps; the states
    of the outliers and of the spike detector; the sequences of all steps; the number of rewinds."""

    def __init__(
        self, config: Guard, device: torch.device, norm_divisor: float = 1.0, loss_changes: Sequence[int] = ()
    ):
        """`norm_divisor`: of this rank's gradient norm in the mean over all ranks. `loss_changes`: numbers
        of the sequences, in ascending order, from which on losses and gradient norms are of another kind,
        because the sources or the sequence length change. Steps are compared with the steps since the last
        such change."""
        self.config, self._norm_divisor, self._loss_changes = config, norm_divisor, loss_changes
        self._streak = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._outliers: Outliers | None = None
        if config.skip_sigma > 0:
            self._outliers = Outliers(config.skip_sigma, config.window, config.max_consecutive, device)
        self._spikes = SpikeDetector()
        self._sequences = StepSequences()
        self._unread = deque[_Unread]()
        self._unreported: list[Decision | Spike] = []  # read, but not returned by read()
        self._read_streak: _Streak | None = None  # of the steps that were read; None: it has ended
        self._was_empty = False  # whether a step without a target was read
        self.diverged = False
        self.spike: Spike | None = None
        """The newest spike that read() has returned since the last rewind."""
        self.num_rewinds = 0

    def summands(self, grad_norm: torch.Tensor) -> list[torch.Tensor]:
        """The values that judge() needs as sums over all ranks: whether the gradient norm is not finite, and
        for outliers its share of the mean. Ranks with copies of one gradient may have norms that differ."""
        not_finite = ~grad_norm.isfinite()
        return [not_finite] if self._outliers is None else [not_finite, grad_norm / self._norm_divisor]

    def judge(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        norm_sums: Sequence[torch.Tensor],
        step: int,
        first_sequence: int,
        next_sequence: int,
        num_targets: torch.Tensor,
    ) -> torch.Tensor:
        """Whether to apply this step's update: bool scalar on the device; no host synchronisation.

        `loss`: loss of the whole step. `norm_sums`: the sums of summands(). `num_targets`: targets that count
        in the whole step; a step without any is neither applied nor compared with other steps, and no streak
        ends at it. All three are equal on all ranks, and so is the decision. `grad_norm` is for the log. The
        step's sequences are those from `first_sequence` to before `next_sequence`; they tell where losses can
        no longer be compared, and which sequences a rewind skips.
        """
        bad_norms, *means = norm_sums
        finite = loss.isfinite() & (bad_norms == 0)
        allowed = self._streak < self.config.limit  # at the limit, no update is applied any more
        is_empty = finite & (num_targets == 0)
        apply = finite & allowed & ~is_empty
        streak = torch.where(finite, 0, self._streak + 1)
        self._streak = torch.where(allowed & ~is_empty, streak, self._streak)
        norm = torch.where(bad_norms == 0, means[0] if means else grad_norm.to(loss), torch.nan)
        self._sequences.add(step, first_sequence, next_sequence)
        is_other_loss = self._is_other_loss(step)
        evidence: list[torch.Tensor] = []
        if self._outliers is not None:
            if is_other_loss:
                self._outliers.restart()
            apply, values = self._outliers.judge(loss, norm, apply)
            evidence = [values]
        self._skipped = self._skipped + (~apply & ~is_empty)
        values = torch.stack([(~apply).float(), is_empty.float(), self._streak.float(), loss, norm])
        copy = HostCopy(torch.cat([values, *evidence]) if evidence else values)
        self._unread.append(_Unread(step, first_sequence, next_sequence - 1, is_other_loss, copy))
        return apply

    def _is_other_loss(self, step: int) -> bool:
        """Whether the loss of the newest step cannot be compared with the loss of the step before."""
        before, now = (self.sequences_of(s, s)[0] for s in (step - 1, step))
        return bisect_right(self._loss_changes, before) < bisect_right(self._loss_changes, now)

    def read(self, leave: int = 0) -> list[GuardEvent]:
        """Read the decisions on all steps but the newest `leave`. Logs and returns the steps that were
        skipped, the outliers that were accepted, and the spikes; sets `diverged` after as many non-finite
        steps in a row as the limit, or after a spike that is to end the run. With `leave` = 1 this waits for
        no work that was just queued."""
        self._take(leave)
        events = []
        for finding in self._unreported:
            if isinstance(finding, Spike):
                events.append(self._report_spike(finding))
                continue
            sigma = self._outliers.sigma if self._outliers else 0.0
            text = finding.describe(self.config.limit, sigma)
            logger.info(text)  # a warning would be logged by every rank
            event: Event = "skipped" if finding.skipped else "accepted"
            events.append(GuardEvent(finding.step, event, {**finding.about(), "text": text}))
        self._unreported = []
        return events

    def _take(self, leave: int) -> None:
        """Read the decisions on all steps but the newest `leave`, without reporting them."""
        while len(self._unread) > leave:
            unread = self._unread.popleft()
            decision = unread.read()
            if self.diverged:
                continue
            if unread.is_other_loss:
                self._spikes.restart()
            if decision.streak == 0:
                self._read_streak = None
            if decision.is_empty:
                self._note_empty(decision.step)
                continue
            if decision.skipped or decision.restarted:
                self._unreported.append(decision)
            if decision.skipped and not decision.is_finite:
                known = self._read_streak
                first = known.first if known and decision.streak > 1 else decision.step
                self._read_streak = _Streak(first, decision.step, decision.streak)
                self.diverged = decision.streak >= self.config.limit
            if not decision.skipped and (spike := self._spikes.add(decision.step, decision.loss)):
                self._unreported.append(spike)

    def _note_empty(self, step: int) -> None:
        if not self._was_empty:
            logger.info(
                f"step {step} has no target that counts and changes nothing; later such steps are not logged"
            )
        self._was_empty = True

    def _report_spike(self, spike: Spike) -> GuardEvent:
        first, last = self.sequences_of(spike.start_step, spike.detected_step)
        text = f"{spike}; the sequences of these steps are {first} to {last}"
        logger.info(text)
        self.spike = spike
        can_rewind = self.config.on_spike == "rewind" and self.num_rewinds < self.config.max_rewinds
        self.diverged = self.diverged or not (self.config.on_spike == "log" or can_rewind)
        about = asdict(spike) | {"first_sequence": first, "last_sequence": last, "text": text}
        return GuardEvent(spike.detected_step, "spike", about)

    @property
    def must_rewind(self) -> bool:
        """Whether read() has returned a spike after which the run has to rewind."""
        return self.spike is not None and self.config.on_spike == "rewind" and not self.diverged

    def sequences_of(self, first_step: int, last_step: int) -> tuple[int, int]:
        """The first sequence of one step and the last sequence of another. All steps of the run that were
        judged are known, also those before a resume; a step before step 1 counts as step 1."""
        return self._sequences.between(first_step, last_step)

    def in_streak(self) -> bool:
        """Whether the newest step was skipped. Waits for the device."""
        return self._streak.item() > 0 or (self._outliers is not None and self._outliers.in_streak())

    def is_healthy(self) -> bool:
        """Whether the newest step was not skipped, and the loss is not so high that a spike may have begun or
        lasts. Waits for the device."""
        self._take(0)
        return not self.in_streak() and not self._spikes.is_high

    def ended_in_streak(self) -> bool:
        """Whether the newest step with a target that read() or load_state_dict() knows was not finite."""
        return self._read_streak is not None

    def skipped_steps(self) -> int:
        """Number of steps skipped since the beginning of the run. Waits for the device."""
        return int(self._skipped.item())

    def _spike_ends_the_run(self) -> Spike | None:
        return self.spike if self.config.on_spike != "log" else None

    def reason(self) -> str:
        """Why the run ends, if it has diverged or its last step was not finite."""
        if spike := self._spike_ends_the_run():
            first, last = self.sequences_of(spike.start_step, spike.detected_step)
            reason = f"training has diverged: {spike} (sequences {first} to {last})"
            limit = self.config.max_rewinds
            is_at_limit = self.config.on_spike == "rewind" and self.num_rewinds >= limit
            return (
                f"{reason}; guard.max_rewinds = {limit} allows no further rewind" if is_at_limit else reason
            )
        assert self._read_streak is not None
        first, last, num = self._read_streak
        steps = f"step {last}" if num == 1 else f"{num} steps in a row, {first} to {last},"
        return f"training has diverged: {steps} had a loss or gradient norm that is not finite"

    def first_bad_step(self) -> int | None:
        """The first step of the spike or of the streak that reason() names; None if there is neither."""
        if spike := self._spike_ends_the_run():
            return spike.start_step
        return self._read_streak.first if self._read_streak else None

    def sequences_of_spike(self) -> list[tuple[int, int]]:
        """The first and the last sequence of the spike that reason() names; [] if it names none."""
        spike = self._spike_ends_the_run()
        return [self.sequences_of(spike.start_step, spike.detected_step)] if spike else []

    def state_dict(self) -> dict[str, Any]:
        """Plain values for train.json, with the decision on the newest step. Waits for the device."""
        self._take(0)
        spikes = [asdict(finding) for finding in self._unreported if isinstance(finding, Spike)]
        streak = self._read_streak
        return {
            "streak": streak.num if streak else 0,
            "streak_steps": [streak.first, streak.last] if streak else [],
            "skipped_steps": self.skipped_steps(),
            "outliers": self._outliers.state_dict() if self._outliers else NO_OUTLIERS,
            "spikes": self._spikes.state_dict(),
            "unreported_spikes": spikes,
            "sequences": self._sequences.state_dict(),
            "num_rewinds": self.num_rewinds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A streak at the limit has ended the run that saved it, and is counted
        anew."""
        num = state["streak"]
        self._streak.fill_(num if num < self.config.limit else 0)
        self._read_streak = _Streak._make([*state["streak_steps"], num]) if num else None
        self._skipped.fill_(state["skipped_steps"])
        if self._outliers is not None:
            self._outliers.load_state_dict(state["outliers"])
        self._spikes.load_state_dict(state["spikes"])
        self._sequences.load_state_dict(state["sequences"])
        self._unread.clear()
        self._unreported = [Spike(**spike) for spike in state["unreported_spikes"]]
        self.diverged, self.spike, self.num_rewinds = False, None, state["num_rewinds"]
