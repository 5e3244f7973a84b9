"""Reads the files of a run folder: returns all readable records, and names all faults in `problems`."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.checkpoint import commit
from titanlite.config import json_file, toml
from titanlite.config.component import ConfigError
from titanlite.files import FileFault, read_regular
from titanlite.report.estimates import Floats, Series
from titanlite.report.events import RunEvent, events_of

METRICS, SUPERSEDED, EVENTS = "metrics.jsonl", "metrics.superseded.jsonl", "events.jsonl"
EXPERT_LOADS = "expert_loads.jsonl"
SAMPLES, SOURCES = "samples.txt", "sources.json"
TOKENS, SEQUENCES = "progress/total_tokens", "progress/sequences"
MAX_STEP = 2**53
MAX_NAMED = 5  # holes, lines and the like that are named one by one
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Record = dict[str, Any]  # one line of metrics.jsonl


class SourceShare(NamedTuple):
    """A source of the run's training sequences. `sequences`: their number in one epoch. `shares`: the share
    of the source by the first sequence of each stage."""

    label: str
    shares: list[tuple[int, float]]
    sequences: int

    def epochs(self, num_sequences: float) -> float:
        """Return how many epochs of the source the first `num_sequences` sequences of the run have."""
        ends = [*(first for first, _ in self.shares[1:]), math.inf]
        reads = [share * max(min(end, num_sequences) - a, 0) for (a, share), end in zip(self.shares, ends)]
        return sum(reads) / self.sequences


class RecordedStage(NamedTuple):
    """A stage of the run. `label`: its number, from 1, and its name. `changes_loss`: it has other weights or
    another sequence length than the stage before, so that their losses cannot be compared."""

    label: str
    first_sequence: int
    changes_loss: bool


class SavedCheckpoint(NamedTuple):
    """A checkpoint of the run, from its manifest. `fault`: why it cannot be trusted, or empty."""

    step: int
    saved_at: str
    size_bytes: int
    num_ranks: int
    is_kept: bool
    fault: str


class RecordedLoads(NamedTuple):
    """The tokens of each expert in one step, by layer, [layers, experts]."""

    step: int
    tokens_LE: Floats


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The content of the files of one run. `records` have one entry per logged step, in the order of steps.
    `superseded` are records of steps that the run took again after a resume or a rewind, in the order of the
    file."""

    name: str
    folder: Path
    records: list[Record]
    superseded: list[Record]
    job: dict[str, Any]
    about: list[
        str
    ]  # the comments at the top of job.toml: the model's shape and size, the optimizer's groups
    env: dict[str, Any]
    samples: dict[int, list[str]]  # step: generated texts
    checkpoints: list[SavedCheckpoint]
    events: list[RunEvent] = field(default_factory=list)
    sources: list[SourceShare] = field(default_factory=list)
    expert_loads: RecordedLoads | None = None  # the newest
    problems: list[str] = field(default_factory=list)

    @cached_property
    def keys(self) -> list[str]:
        """The names of all metrics with at least one number, sorted."""
        return sorted({k for r in self.records for k in r if k != "step" and number(r[k]) is not None})

    @cached_property
    def has_tokens(self) -> bool:
        """Whether the records count tokens. If not, steps stand for tokens."""
        return any(_valid_tokens(record) for record in self.records)

    @cached_property
    def _tokens(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        steps = np.array([r["step"] for r in self.records], np.float64)
        if not self.has_tokens:
            return steps
        have = [r for r in self.records if _valid_tokens(r)]
        known = np.array([r["step"] for r in have], np.float64)
        return np.interp(steps, known, np.array([r[TOKENS] for r in have], np.float64))

    def series(self, key: str) -> Series:
        """Return the series of one metric at the steps that have it."""
        if key not in self._series:
            self._series[key] = self._make_series(key)
        return self._series[key]

    @cached_property
    def _series(self) -> dict[str, Series]:
        return {}

    def _make_series(self, key: str) -> Series:
        values = [number(record.get(key)) for record in self.records]
        at = np.array([i for i, value in enumerate(values) if value is not None], np.int64)
        steps = np.array([record["step"] for record in self.records], np.int64)
        return Series(steps[at], self._tokens[at], np.array([v for v in values if v is not None], np.float64))

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric."""
        values = self.series(key).finite().values
        return float(values[-1]) if len(values) else None

    def setting(self, key: str) -> Any:
        """Return the value of a key of job.toml, such as `optimizer.lr`; None if it is not there."""
        node: Any = self.job
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def epochs(self, step: int) -> str:
        """Return how many epochs of each source the run had read by a step, as text; empty if that is not
        known."""
        consumed = self.series(SEQUENCES).finite()
        if not len(consumed) or not self.sources:
            return ""
        num = float(np.interp(step, consumed.steps, consumed.values))
        parts = [f"{source.epochs(num):.2f} of {source.label}" for source in self.sources[:MAX_NAMED]]
        return ", ".join([*parts, *["..."] * (len(self.sources) > MAX_NAMED)])

    def stages(self) -> list[RecordedStage]:
        """Return the stages of the run; none if it has no [[stages]], or if their places cannot be read."""
        tables, first, stages = self.setting("stages"), 0, list[RecordedStage]()
        before: Any = None
        for i, table in enumerate(tables if isinstance(tables, list) else [], 1):
            table = table if isinstance(table, dict) else {}
            name, until = str(table.get("name", "")), str(table.get("until", ""))
            kind = table.get("weights"), table.get("seq_len")
            changes_loss = before not in (None, kind)
            stages.append(RecordedStage(f"{i} ({name})" if name else f"{i}", first, changes_loss))
            before = kind
            end = re.fullmatch(r"(\d{1,18}) sequences", until)
            if end is None:
                return stages if until == "end" else []
            first = int(end[1])
        return []

    def loss_changes(self) -> list[int]:
        """Return the last step before each stage that has begun and whose losses cannot be compared with
        those before it; estimated if not every step is logged."""
        consumed = self.series(SEQUENCES).finite()
        firsts = [stage.first_sequence for stage in self.stages() if stage.changes_loss]
        if not len(consumed):
            return []
        steps = np.ceil(np.interp(firsts, consumed.values, consumed.steps))
        return [int(step) for step in steps if step < consumed.steps[-1]]

    def skipped_sequences(self) -> list[tuple[int, int]]:
        """Return the first and the last number of the ranges of sequences that the run skips for good."""
        by_hand = self.setting("data.skip_sequences")
        ranges = (
            [tuple(pair) for pair in by_hand if isinstance(pair, list)] if isinstance(by_hand, list) else []
        )
        abouts = [event.about for event in self.rewinds()]
        ranges += [(about.get("first_sequence"), about.get("last_sequence")) for about in abouts]
        return sorted({r for r in ranges if len(r) == 2 and all(type(number) is int for number in r)})

    def rewinds(self) -> list[RunEvent]:
        """Return the rewinds of the run, also those to steps that were trained again later."""
        return self.since_start("rewound")

    def since_start(self, kind: str) -> list[RunEvent]:
        """Return the events of a kind, also those of steps that were trained again later. Events from before
        a restart (checkpoint.restart) were of another run."""
        kinds = [event.kind for event in self.events]
        num_before = len(kinds) - kinds[::-1].index("started") if "started" in kinds else 0
        return [event for event in self.events[num_before:] if event.kind == kind]

    def happened(self, *kinds: str) -> list[RunEvent]:
        """Return the events of these kinds whose steps were not trained again later."""
        return [event for event in self.events if event.kind in kinds and not event.is_superseded]

    def saves(self) -> set[int]:
        """Return the steps after which the run was saved. For checkpoints that no longer exist it is the
        logged step before the record that has the time of the save."""
        known, estimated = sorted(saved.step for saved in self.checkpoints), set[int]()
        for before, record in pairwise(self.records):
            if (number(record.get("checkpoint/stall_s")) or 0) > 0:
                at = bisect_left(known, before["step"])
                if at == len(known) or known[at] >= record["step"]:
                    estimated.add(before["step"])
        return estimated.union(known)

    def resumes(self) -> list[int]:
        """Return the steps after which the run was started again. A later rewind removes the record of the
        first step of a start, and runs of older versions have no events."""
        started = [r["step"] - 1 for r in self.records if number(r.get("time/to_first_step_s")) is not None]
        resumed = [event.step for event in self.happened("resumed")]
        return sorted({step for step in [*started, *resumed] if step > 0})


def number(value: Any) -> float | None:
    """Return a metric as a number, or None if it is something else, such as a hash."""
    if isinstance(value, str):
        return NON_FINITE.get(value.lower())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else math.inf if value > 0 else -math.inf


def read_run(folder: Path, name: str) -> RecordedRun:
    """Read a run folder. Raises ConfigError if it has no metrics.jsonl with a record that could be read."""
    if folder.name == METRICS:
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such run folder")
    problems: list[str] = []
    data = _bytes(folder / METRICS, problems)
    if data is None:
        reason = problems[0] if problems else f"{METRICS} is missing"
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{METRICS}"))
        runs = f"; it has the runs {', '.join(inside[:MAX_NAMED])}" if inside else ""
        runs += ", ..." if len(inside) > MAX_NAMED else ""
        raise ConfigError(f"{folder} is not a run folder with metrics: {reason}{runs}")
    records = _one_per_step(_records(data, METRICS, problems), problems)
    if not records:
        raise ConfigError(f"{folder / METRICS} has no record" + (f": {problems[0]}" if problems else ""))
    superseded = _records(_bytes(folder / SUPERSEDED, problems) or b"", SUPERSEDED, problems)
    _name_holes(records, problems)
    job, about = _job(folder, problems)
    events = _bytes(folder / EVENTS, problems, "spikes, rewinds and the like")
    return RecordedRun(
        name=name,
        folder=folder,
        records=records,
        superseded=superseded,
        job=job,
        about=about,
        env=_env(folder, problems),
        samples=_samples(folder, problems),
        checkpoints=_checkpoints(folder, job),
        events=events_of(_records(events or b"", EVENTS, problems)),
        sources=_sources(folder, problems),
        expert_loads=_expert_loads(folder, problems),
        problems=problems,
    )


def names_of(folders: list[Path]) -> list[str]:
    """Return a short, unique name for each folder: its last parts, as many as all of them need."""
    parts = [folder.resolve().parts for folder in folders]
    for num in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-num:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{i}: {folder}" for i, folder in enumerate(folders, 1)]


def _bytes(path: Path, problems: list[str], not_known: str = "") -> bytes | None:
    """The content of a file; None if it is missing, or cannot be read. `not_known`: what is not known without
    it; empty: a run may do without it."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        if not_known:
            problems.append(f"there is no {path.name}: {not_known} are not known")
        return None
    except (OSError, FileFault) as e:
        problems.append(f"{path.name} cannot be read: {getattr(e, 'strerror', None) or e}")
        return None


def _records(data: bytes, name: str, problems: list[str]) -> list[Record]:
    records, damaged = [], []
    for i, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json_file.parse(line.decode())
            json_file.expect(record, step=int)
            if not 0 <= record["step"] < MAX_STEP:
                raise ValueError("no step has this number")
            records.append(record)
        except ValueError:
            damaged.append(i)
    if damaged and damaged[-1] == data.count(b"\n") + 1:  # without an end of its line
        damaged.pop()
        problems.append(f"{name}: the last record was cut short, as by a kill, and is left out")
    if damaged:
        shown = ", ".join(map(str, damaged[:MAX_NAMED])) + (", ..." if len(damaged) > MAX_NAMED else "")
        lines = f"{len(damaged)} line{'s' if len(damaged) > 1 else ''}"
        problems.append(f"{name}: damaged records are left out, in {lines}: {shown}")
    return records


def _one_per_step(records: list[Record], problems: list[str]) -> list[Record]:
    """The records in the order of steps; of several for one step, the last."""
    by_step = {record["step"]: record for record in records}
    if len(by_step) < len(records):
        num = len(records) - len(by_step)
        problems.append(f"{METRICS}: {num} steps are recorded again later; the last record of each is shown")
    for key in (TOKENS, "train/loss"):
        num = sum(number(record.get(key)) is None for record in by_step.values())
        if num:
            problems.append(f"{METRICS}: {num} of {len(by_step)} records have no {key}")
    return [by_step[step] for step in sorted(by_step)]


def _name_holes(records: list[Record], problems: list[str]) -> None:
    steps = np.array([record["step"] for record in records], np.int64)
    gaps = np.diff(steps)
    if len(gaps) < 2:
        return
    holes = np.flatnonzero(gaps > 3 * np.median(gaps))
    for i in holes[:MAX_NAMED]:
        problems.append(f"{METRICS}: nothing is recorded between steps {steps[i]} and {steps[i + 1]}")
    if len(holes) > MAX_NAMED:
        problems.append(f"{METRICS}: {len(holes) - MAX_NAMED} more such holes")


def _valid_tokens(record: Record) -> bool:
    tokens = number(record.get(TOKENS))
    return tokens is not None and math.isfinite(tokens)


def _job(folder: Path, problems: list[str]) -> tuple[dict[str, Any], list[str]]:
    data = _bytes(folder / "job.toml", problems, "settings")
    if data is None:
        return {}, []
    try:
        text = data.decode()
        tree = toml.parse(text)
    except ValueError as e:
        problems.append(f"job.toml cannot be read: {e}")
        return {}, []
    head = text.partition("\n\n")[0].splitlines()
    return tree, [line[2:] for line in head if line.startswith("# ")]


def _env(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return json_file.load_object(folder / "env.json")
    except FileNotFoundError:
        problems.append("there is no env.json: hardware and versions are not known")
    except (OSError, ValueError) as e:
        problems.append(f"env.json cannot be read: {e}")
    return {}


def _sources(folder: Path, problems: list[str]) -> list[SourceShare]:
    """The sources in sources.json."""
    try:
        tree = json_file.load_object(folder / SOURCES)
        json_file.expect(tree, sources=list)
        return [_source(entry) for entry in tree["sources"]]
    except FileNotFoundError:
        problems.append(f"there is no {SOURCES}: epochs are not known")
    except (OSError, ValueError) as e:
        problems.append(f"{SOURCES} cannot be read: {e}")
    return []


def _source(entry: Any) -> SourceShare:
    json_file.expect(entry, source=str, sequences=int)
    pairs = entry.get("stages", [[0, entry.get("share")]])
    pairs = pairs if isinstance(pairs, list) else []
    shares = list[tuple[int, float]]()
    for first, share in (pair for pair in pairs if isinstance(pair, list) and len(pair) == 2):
        share = number(share)
        if type(first) is int and share is not None and 0 <= share <= 1:
            shares.append((first, share))
    if not shares or len(shares) < len(pairs) or not 0 < entry["sequences"] < MAX_STEP:
        raise ValueError(f"{entry['source']} has no possible share and number of sequences")
    return SourceShare(entry["source"], shares, entry["sequences"])


def _expert_loads(folder: Path, problems: list[str]) -> RecordedLoads | None:
    """The newest loads of experts; None if there are none."""
    records = _records(_bytes(folder / EXPERT_LOADS, problems) or b"", EXPERT_LOADS, problems)
    if not records:
        return None
    newest = max(records, key=lambda record: record["step"])
    try:
        tokens_LE = np.array(list(newest["tokens"].values()), np.float64)
        sums_L = tokens_LE.sum(axis=-1)
        is_possible = (tokens_LE >= 0).all() and ((sums_L >= 1) & np.isfinite(sums_L)).all()
        if tokens_LE.ndim != 2 or not is_possible:
            raise ValueError("no numbers of tokens")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        problems.append(f"{EXPERT_LOADS}: the loads of step {newest['step']} cannot be read")
        return None
    return RecordedLoads(newest["step"], tokens_LE)


def _samples(folder: Path, problems: list[str]) -> dict[int, list[str]]:
    text = (_bytes(folder / SAMPLES, problems) or b"").decode(errors="replace")
    heads = list(re.finditer(r"^--- step (\d{1,18})\n", text, flags=re.MULTILINE))
    if text.strip() and not heads:
        problems.append(f"{SAMPLES} has no line that begins a sample")
    samples: dict[int, list[str]] = {}
    for head, after in zip(heads, [*heads[1:], None]):
        body = text[head.end() : after.start() if after else len(text)].removesuffix("\n")
        samples.setdefault(int(head[1]), []).append(body)
    return samples


def _checkpoints(folder: Path, job: dict[str, Any]) -> list[SavedCheckpoint]:
    section = job.get("checkpoint")
    name = section.get("folder", "checkpoint") if isinstance(section, dict) else "checkpoint"
    if not isinstance(name, str):
        name = "checkpoint"
    try:
        committed = commit.list_committed(folder / name)
    except (OSError, ValueError):
        return []
    return [_checkpoint(step, path) for step, path in committed]


def _checkpoint(step: int, path: Path) -> SavedCheckpoint:
    try:
        reason = commit.fault(path, step) or ""
        manifest = commit.read_manifest(path)
        size = sum(digest.size for digest in commit.digests(manifest).values())
        return SavedCheckpoint(
            step, manifest["saved_at"], size, manifest["ranks"], commit.is_kept(path), reason
        )
    except (OSError, ValueError, commit.CheckpointError) as e:
        return SavedCheckpoint(step, "", 0, 0, False, str(e))
