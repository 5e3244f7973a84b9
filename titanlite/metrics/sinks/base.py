"""The contract of a metric sink. Only rank 0 has sinks.

A run that resumes after step s, or rewinds to it, takes the later steps again. A sink should then drop or
mark its records of those steps, so that no step is shown twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal

from titanlite.config.component import Component, ConfigError
from titanlite.config.imports import error_with_place
from titanlite.log import logger
from titanlite.metrics.sinks.run_id import identify

Values = Mapping[str, Any]  # metric name: int, float or str
Event = Literal["resumed", "skipped", "accepted", "spike", "rewound", "fault", "saved", "ended", "recovered"]
ALL_DONE, STOPPED = "all steps are done", "asked to stop"  # reasons of `ended`; others are errors
Table = Literal["parameters", "probe", "expert_loads"]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The identity of a run, for its sinks."""

    folder: PurePath
    """The run folder; it exists."""
    run_id: str
    """Made when a run starts at its first step, and kept by all its resumes. A copy of a run folder has
    another one."""
    job: dict[str, Any]
    """The resolved configuration, as the tree of its TOML file."""
    resumed_step: int
    """The step after which the run continues; 0: a new run."""
    total_steps: int
    """The step at which the run ends: training.steps."""
    copied_from: str = ""
    """The run_id of the run whose folder was copied; empty: the folder is no copy."""
    copied_at_step: int = 0
    """The step after which a copy first continued."""

    @classmethod
    def identify(cls, folder: PurePath, job: dict[str, Any], resumed_step: int, total_steps: int) -> RunInfo:
        """The identity of the run in a folder, which is recorded in <run folder>/run_id.json."""
        known = identify(folder, resumed_step)
        return cls(
            folder=folder,
            run_id=known.run_id,
            job=job,
            resumed_step=resumed_step,
            total_steps=total_steps,
            copied_from=known.copied_from,
            copied_at_step=known.copied_at_step,
        )


class Writer:
    """An open sink. Training waits for each call, so a sink that talks to a network should use a thread. A
    method that a sink does not override does nothing."""

    def write(self, step: int, values: Values) -> None:
        """Take the metrics of one logged step."""

    def sample(self, step: int, text: str) -> None:
        """Take one text to read: a generated one, or questions of a task with their scores."""

    def event(self, step: int, event: Event, about: Values) -> None:
        """Take an event: `resumed` (a new process continues the run after `step`), `rewound` (the run went
        back to `step` within the process and continues after it; as after `resumed`, a sink should drop its
        records of later steps), `skipped` (the update of `step` was not applied), `accepted` (`step` is an
        outlier and was applied, because too many in a row had been skipped), `spike` (the loss has spiked,
        which was detected at `step`), `fault` (after `step`, ranks computed the same micro-batch, and their
        results differed), `saved` (the checkpoint of `step` is complete; with asynchronous saves this comes
        some steps later), `ended` (the process ends after `step`, with the reason `all steps are done`,
        `asked to stop` or an error; a process that is killed does not say so), `recovered` (`step` is the
        first one after the launcher has started the ranks again). `about`: numbers and texts that explain
        the event, such as loss, first_sequence, last_sequence, reason and seconds; may be empty."""

    def table(self, step: int, kind: Table, values: Values) -> None:
        """Take a table of one step, whose values are too many for metrics: `parameters`, norm of gradient,
        norm of weight and update ratio by parameter; `probe`, statistics by block and head; `expert_loads`,
        tokens by block and expert. `values` may be nested."""

    def close(self) -> None:
        """Flush; the last call."""


@dataclass(frozen=True, kw_only=True)
class Sink(Component, makes=(Writer,)):
    """The base class of metric sinks, which `[[metrics.sinks]] name = "..."` selects."""

    @abstractmethod
    def build(self, run: RunInfo) -> Writer:
        """Open the sink for a run. Raises ConfigError for a setting that cannot work, which ends the run
        before its first step. After any other exception the run continues without this sink."""


class Sinks:
    """All open sinks of a run, by name. An exception that one raises does not reach the run or the others:
    the first of each sink is logged, and the rest are counted."""

    def __init__(self, writers: Mapping[str, Writer]):
        self.writers = dict(writers)
        self._failures = Counter[str]()

    def add(self, sink: Sink, run: RunInfo) -> None:
        """Open one more. Raises ConfigError."""
        try:
            self.writers[sink.name] = sink.build(run)
        except ConfigError:
            raise
        except ImportError as e:  # waiting does not mend it
            raise ConfigError(
                f"{sink.name} needs a package that is not installed: {e}", "metrics.sinks"
            ) from e
        except Exception as e:
            logger.error(
                f"metric sink {sink.name} cannot be opened, training continues: {error_with_place(e)}"
            )

    def write(self, step: int, values: Values) -> None:
        """Send the metrics of one logged step to all sinks."""
        self._each(lambda writer: writer.write(step, values))

    def sample(self, step: int, text: str) -> None:
        """Send a text to all sinks."""
        self._each(lambda writer: writer.sample(step, text))

    def event(self, step: int, event: Event, about: Values = MappingProxyType({})) -> None:
        """Send an event to all sinks."""
        self._each(lambda writer: writer.event(step, event, about))

    def table(self, step: int, kind: Table, values: Values) -> None:
        """Send a table to all sinks."""
        self._each(lambda writer: writer.table(step, kind, values))

    def close(self) -> None:
        """Flush and close all sinks."""
        self._each(lambda writer: writer.close())
        for name, number in self._failures.items():
            logger.error(f"metric sink {name} failed {number} times")

    def _each(self, call: Callable[[Writer], None]) -> None:
        for name, writer in self.writers.items():
            try:
                call(writer)
            except Exception as e:
                if not self._failures[name]:
                    reason = error_with_place(e)
                    if isinstance(e, OSError) and e.filename:
                        reason = f"{e.filename}: {e.strerror}"
                    logger.error(f"metric sink {name} failed, training continues: {reason}")
                self._failures[name] += 1
