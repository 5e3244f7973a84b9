"""Sinks that send a run to an experiment tracker, such as Weights & Biases.

The tracker gets every step once. A run that was killed and resumed does not send the steps again that it
repeats, and sends the steps that the killed process did not send, from metrics.jsonl. A run that rewinds, or
goes back and continues differently, and a copy of a run folder begin a new run of the tracker, a branch,
which gets the steps before the branch, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.config import json_file
from titanlite.config.component import ConfigError
from titanlite.log import logger
from titanlite.metrics.sinks.base import Event, RunInfo, Sink, Values, Writer
from titanlite.metrics.sinks.samples import split_samples, step_of_sample
from titanlite.report.trackers.background import Background
from titanlite.report.trackers.journal import Branch, Journal
from titanlite.storage import local_path

Numbers = Mapping[str, float]
NOT_FINITE = ("nan", "inf", "-inf")  # strings in metrics.jsonl
# Keys of job.toml that decide the course of training. Keys of the layout and of kernels only change rounding.
SETTINGS = ("optimizer.", "loss.", "float8.", "moe.", "training.clip", "training.max_norm",
            "training.mixed_precision")  # fmt: skip
# Nats, and share of the loss: in bf16 two kernels come to differ by so much (docs/numerics.md).
LOSS_ROUNDING = 0.01


@dataclass(frozen=True, kw_only=True)
class TrackerRun:
    """A run of the tracker."""

    id: str
    """The id of the run folder; branches have `-b1`, `-b2`, ... at the end."""
    name: str
    """For people."""
    config: dict[str, Any]
    """The job, as a tree, with run_id, and branched_from and branched_at_step for a branch."""


class Client(ABC):
    """The client of a tracker's library. All calls come from one thread, and may wait or raise."""

    run_name = ""
    """Name of the run by the library's own environment variables; empty: they name none."""

    @abstractmethod
    def begin(self, run: TrackerRun) -> str:
        """Open a run of the tracker, or continue it if it exists. Returns the target: where the records go,
        for the journal."""

    def known_steps(self, sent: set[int]) -> set[int]:
        """The steps whose metrics the tracker has. `sent`: those that were sent to it before, which it may
        have lost."""
        return sent

    @abstractmethod
    def log(self, step: int, numbers: Numbers) -> None:
        """Send numbers of a step."""

    @abstractmethod
    def sample(self, step: int, index: int, text: str) -> None:
        """Send a generated text. `index`: its number among the texts of the step."""

    @abstractmethod
    def end(self, is_complete: bool) -> None:
        """Flush, and end the run. `is_complete`: it has taken its last step."""


@dataclass(frozen=True, kw_only=True)
class Tracker(Sink):
    """Base class of the sinks that send a run to a tracker."""

    run_name: str = ""
    """Name in the tracker; empty: WANDB_NAME for wandb, else the run folder's name."""

    @abstractmethod
    def client(self, run: RunInfo) -> Client | None:
        """The client of the tracker, not connected yet; imports its library. None: the library's own
        environment variables disable it. Raises ConfigError for a setting that cannot work."""

    def build(self, run: RunInfo) -> Writer:
        open_delivery = self.opener(run)
        if open_delivery is None:
            logger.warning(f"{self.name} is disabled by its environment variables: nothing is sent to it")
            return Writer()
        remedy = f"; `titanlite metrics push {run.folder}` sends the steps that are missing"
        return Background(self.name, open_delivery, remedy)

    def opener(self, run: RunInfo) -> Callable[[], Delivery] | None:
        """A function that opens the run in the tracker and sends what it lacks, which waits for the tracker.
        None: the tracker is disabled. Raises ConfigError for a library that is missing and for a setting that
        cannot work."""
        folder = local_path(run.folder, f"sink {self.name}")
        try:
            client = self.client(run)
        except ImportError as e:
            raise ConfigError(
                f"sink {self.name}: its package cannot be imported ({e}); pip install "
                f"'titanlite[{self.name}]'",
                "metrics.sinks",
            ) from None
        journal = folder / "trackers" / f"{self.name}.jsonl"
        name = self.run_name or (client.run_name if client else "")
        return partial(Delivery, client, run, name, journal) if client else None


class Delivery(Writer):
    """Sends the records of a run to a tracker, each record once."""

    def __init__(self, client: Client, run: RunInfo, name: str, journal: Path):
        self.num_sent = 0
        """Number of records of metrics that were sent."""
        self.target = ""
        """Where the records go."""
        self._client, self._run = client, run
        self._name = name or Path(run.folder).absolute().name
        self._journal = Journal(journal)
        self._last_step, self._settings = run.resumed_step, _settings(run.job)
        self._sample = (0, 0)  # step and index of the last one
        self._sent = dict[str, str]()
        self._is_begun = False
        self._begin(self._branch_at_start())

    def write(self, step: int, values: Values) -> None:
        if self._differs(step, values):
            self._go_back(min(self._last_step, step - 1))
        self._send_metrics(step, values)
        self._last_step = step

    def sample(self, step: int, text: str) -> None:
        index = self._sample[1] + 1 if self._sample[0] == step else 0
        self._sample = (step, index)
        self._send_sample(step, index, text)

    def event(self, step: int, event: Event, about: Values) -> None:
        if event == "rewound":
            self._go_back(step)
        numbers = {f"events/{event}_{name}": number for name, number in numbers_of(about).items()}
        self._once(f"{step} {event}", lambda: self._client.log(step, {f"events/{event}": 1, **numbers}))

    def close(self) -> None:
        try:
            self._ensure_begun()
            self._catch_up()  # records that a full queue or a failure has left out
        finally:
            if self._is_begun:
                self._client.end(is_complete=self._last_step >= self._run.total_steps)

    def _branch_at_start(self) -> Branch:
        """The branch that the run continues: a new one if it has gone back with load_step, or if records were
        written in the meantime that differ from those that were sent."""
        run, branch = self._run, self._journal.newest(self._run.run_id) or self._first_branch()
        self._sent = self._journal.sent(branch)
        steps = [int(key) for key in self._sent if key.isdecimal()]
        went_back = run.job.get("checkpoint", {}).get("load_step") == run.resumed_step != branch.step
        if went_back and max(steps, default=0) > run.resumed_step:
            return branch.next_at(run.resumed_step)
        last_equal = 0
        for step, values in metrics_of(Path(run.folder), run.resumed_step):
            if self._differs(step, values):
                return branch.next_at(last_equal)
            last_equal = step
        return branch

    def _first_branch(self) -> Branch:
        """The branch with which the run begins in this tracker; for a copy, a branch of the run copied."""
        run = self._run
        if not run.copied_from:
            return Branch(run.run_id)
        copied = self._journal.newest(run.copied_from) or Branch(run.copied_from)
        return Branch(run.run_id, step=run.copied_at_step, parent=copied.tracker_id)

    def _go_back(self, step: int) -> None:
        """Continue after `step`: in a branch, if the tracker has something of later steps."""
        self._last_step, self._sample = step, (0, 0)
        if any(int(key.split()[0]) > step for key in self._sent):
            again = self._branch._replace(step=step)  # it could not be begun
            self._begin(self._branch.next_at(step) if self._is_begun else again)

    def _ensure_begun(self) -> None:
        """Try again to begin the branch, if that has failed."""
        if not self._is_begun:
            self._begin(self._branch)

    def _begin(self, branch: Branch) -> None:
        """Open a branch's run in the tracker, and send what it lacks up to the last step."""
        if self._is_begun:
            self._client.end(is_complete=False)
        self._branch, self._is_begun = branch, False
        config = self._run.job | {"run_id": self._run.run_id}
        sinkless = {key: value for key, value in config.get("metrics", {}).items() if key != "sinks"}
        config |= {"metrics": sinkless}  # an address in [[metrics.sinks]] may hold a password
        name = self._name
        if branch.parent:
            name = f"{name}@{branch.step}"
            config |= {"branched_from": branch.parent, "branched_at_step": branch.step}
        self.target = self._client.begin(TrackerRun(id=branch.tracker_id, name=name, config=config))
        self._sent = self._journal.begin(branch, self.target)
        sent = {int(key) for key in self._sent if key.isdecimal()}
        known = self._client.known_steps(sent)
        for step in sent - known:
            del self._sent[str(step)]
        for step in known - sent:
            self._sent[str(step)] = ""
        self._is_begun = True
        self._catch_up()

    def _catch_up(self) -> None:
        """Send the records in the run folder up to the last step that the tracker lacks."""
        for step, values in metrics_of(Path(self._run.folder), self._last_step):
            self._send_metrics(step, values)
        for step, index, text in samples_of(Path(self._run.folder), self._last_step):
            self._send_sample(step, index, text)

    def _differs(self, step: int, values: Values) -> bool:
        """Whether other metrics were sent for this step."""
        sent = self._sent.get(str(step), "")
        return sent != "" and not _are_same_step(sent, self._signature(values))

    def _signature(self, values: Values) -> str:
        """Data and learning rate of a step, the settings of the run, and the loss, as one text."""
        keys = ("data/batch_sha", "train/learning_rate", "train/loss")
        batch_sha, lr, loss = (values.get(key) for key in keys)
        return f"{batch_sha} {lr} {self._settings} {loss}"

    def _send_metrics(self, step: int, values: Values) -> None:
        log = self._client.log
        self.num_sent += self._once(str(step), lambda: log(step, numbers_of(values)), self._signature(values))

    def _send_sample(self, step: int, index: int, text: str) -> None:
        valid = text.encode(errors="replace").decode()
        self._once(f"{step} sample {index}", lambda: self._client.sample(step, index, valid))

    def _once(self, key: str, send: Callable[[], None], signature: str = "") -> bool:
        """Send a record that was not sent yet. Returns whether it was sent now."""
        self._ensure_begun()
        if key in self._sent:
            return False
        send()
        self._sent[key] = signature
        self._journal.note(key, signature)
        return True


def _settings(job: Mapping[str, Any]) -> str:
    """A hash of the settings that decide the course of training beside data and learning rate."""
    keys = [f"{key}={value}" for key, value in keys_as_text(job) if key.startswith(SETTINGS)]
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]


def _are_same_step(sent: str, now: str) -> bool:
    """Whether two signatures are of the same step: of equal data, learning rates and losses. With the same
    settings, losses may differ by LOSS_ROUNDING, as they do on another layout."""
    try:
        (*course, settings, loss), (*course_now, settings_now, loss_now) = sent.split(), now.split()
        allowed = LOSS_ROUNDING if settings == settings_now else 0.0
        return course == course_now and (
            loss == loss_now or math.isclose(float(loss), float(loss_now), rel_tol=allowed, abs_tol=allowed)
        )
    except ValueError:  # the journal is damaged
        return False


def numbers_of(values: Values) -> dict[str, float]:
    """The metrics that are numbers; text values are left to metrics.jsonl."""
    finite = {k: float(v) if v in NOT_FINITE else v for k, v in values.items()}
    return {k: v for k, v in finite.items() if isinstance(v, (int, float))}


def metrics_of(folder: Path, last_step: float = math.inf) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and values of the records in metrics.jsonl up to a step. Damaged lines are left out."""
    if not (path := folder / "metrics.jsonl").exists():
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                values = json_file.parse(line)
                json_file.expect(values, step=int)
            except ValueError:
                continue
            if (step := values.pop("step")) <= last_step:
                yield step, values


def samples_of(folder: Path, last_step: int) -> Iterator[tuple[int, int, str]]:
    """Step, index and text of the samples in samples.txt up to a step."""
    path, index = folder / "samples.txt", Counter[int]()
    for sample in split_samples(path.read_bytes() if path.exists() else b""):
        try:
            step = step_of_sample(sample)
        except ValueError:
            continue
        if 0 < step <= last_step:
            yield step, index[step], re.sub(r"\A.*\n", "", sample.decode(errors="replace")).removesuffix("\n")
            index[step] += 1


def keys_as_text(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a configuration, and their values as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from keys_as_text(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
