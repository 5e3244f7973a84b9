"""The contract of a learning-rate schedule: a pure function of the step, without state to save."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config.component import Component


@dataclass(frozen=True, kw_only=True)
class LRScheduler(Component, kind="learning-rate schedule"):
    """Base of schedules: `[lr_scheduler] name = "..."` selects a subclass by its name. The learning rate of a
    parameter group is its peak learning rate times `factor`."""

    def factor(self, step: int, training_steps: int) -> float:
        """Factor of the peak learning rate at `step` = 1, 2, ..., in a run of `training_steps` steps.

        Must depend only on the arguments and the schedule's keys. Steps may come in any order, and may be
        steps that are not trained.
        """
        raise NotImplementedError

    def check(self, training_steps: int) -> None:
        """Raises ConfigError, with a full key such as "lr_scheduler.warmup_steps", if the schedule does not
        fit a run of `training_steps` steps. Default: every length fits."""

    def describe(self, training_steps: int) -> str:
        """The schedule of a run of `training_steps` steps in a few words, for the log."""
        return f"{self.name} over {training_steps:,} steps"
