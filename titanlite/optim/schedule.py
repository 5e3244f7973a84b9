"""The contract of a learning-rate schedule: a pure function of the step, so that there is nothing to save and
nothing to restore."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config.component import Component


@dataclass(frozen=True, kw_only=True)
class LRScheduler(Component, kind="learning-rate schedule"):
    """Kind: `[lr_scheduler] name = ...`. The learning rate of a step is the peak rate of its parameter group
    times `factor`. A schedule keeps no state: a resumed run asks for the factors of the steps that it takes.
    """

    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak learning rate at `step` = 1, 2, ..., in a run of `training_steps` steps.

        Depends on the arguments and the schedule's own keys alone; it is also asked for steps that are not
        trained.
        """
        raise NotImplementedError

    def check(self, training_steps: int) -> None:
        """Raises ConfigError if the schedule does not fit a run of `training_steps` steps, with the full name
        of the key, such as "lr_scheduler.warmup_steps". Default: every length fits."""

    def describe(self, training_steps: int) -> str:
        """The schedule of such a run in a few words, with resolved defaults, for the log."""
        return f"{self.name} over {training_steps:,} steps"
