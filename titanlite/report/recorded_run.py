"""Reads the files of a run folder, on a disk or in a bucket, which may be damaged or edited: `problems` names
all that is left out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from titanlite.checkpoint import commit
from titanlite.config import json_file, toml
from titanlite.config.component import ConfigError
from titanlite.files import FileFault, read_regular
from titanlite.report.estimates import Floats, Series
from titanlite.report.events import RunEvent, events_of
from titanlite.storage import storage_of

METRICS, SUPERSEDED, EVENTS = "metrics.jsonl", "metrics.superseded.jsonl", "events.jsonl"
EXPERT_LOADS = "expert_loads.jsonl"
SAMPLES, SOURCES = "samples.txt", "sources.json"
WEIGHTS_DIGEST = "train/weights_digest"
TOKENS, SEQUENCES = "progress/total_tokens", "progress/sequences"
MAX_STEP = 2**53
MAX_NAMED = 5  # lines, sources and the like that are named one by one
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Record = dict[str, Any]  # one line of metrics.jsonl: the step, numbers as floats, and texts such as hashes


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
    """A checkpoint of the run, from its manifest. `weights_digest`: empty if the manifest has none."""

    step: int
    size_bytes: int
    num_ranks: int
    weights_digest: str


class RecordedLoads(NamedTuple):
    """The tokens of each expert in one step, by layer, [layers, experts]."""

    step: int
    tokens_LE: Floats


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The content of the files of one run. `records`: one per logged step, in the order of steps.
    `superseded`: the records of steps that the run took again after a resume or a rewind, in the order of the
    file. `settings`: job.toml as a table with dotted keys; tables in lists are numbered from 0. `about`: the
    comments at the top of job.toml: shape and size of the model, groups of the optimizer. `expert_loads`: the
    newest."""

    name: str
    folder: PurePath
    records: list[Record]
    superseded: list[Record]
    settings: dict[str, Any]
    about: list[str]
    env: dict[str, Any]
    samples: dict[int, list[str]]  # step: generated texts
    checkpoints: list[SavedCheckpoint]
    events: list[RunEvent] = field(default_factory=list)
    stages: list[RecordedStage] = field(default_factory=list)
    sources: list[SourceShare] = field(default_factory=list)
    expert_loads: RecordedLoads | None = None
    problems: list[str] = field(default_factory=list)

    @cached_property
    def keys(self) -> list[str]:
        """The names of all metrics with at least one number, sorted."""
        return sorted({key for record in self.records for key in record if isinstance(record[key], float)})

    @property
    def last_step(self) -> int:
        """The last logged step."""
        return int(self.records[-1]["step"])

    def series(self, key: str) -> Series:
        """Return the series of one metric at the steps that have it."""
        if key not in self._series:
            have = [record for record in self.records if isinstance(record.get(key), float)]
            steps = np.array([record["step"] for record in have], np.int64)
            tokens, values = (np.array([record[k] for record in have], np.float64) for k in (TOKENS, key))
            self._series[key] = Series(steps, tokens, values)
        return self._series[key]

    @cached_property
    def _series(self) -> dict[str, Series]:
        return {}

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric."""
        values = self.series(key).finite().values
        return float(values[-1]) if len(values) else None

    def weights_digests(self) -> dict[int, str]:
        """Return the digests of the weights by step, from manifests of checkpoints and from reports."""
        saved = [(checkpoint.step, checkpoint.weights_digest) for checkpoint in self.checkpoints]
        reported = [(record["step"], record.get(WEIGHTS_DIGEST)) for record in self.records]
        return {step: text for step, text in [*saved, *reported] if isinstance(text, str) and text}

    def setting(self, key: str, *kinds: type) -> Any:
        """Return the value of a key of job.toml, such as `optimizer.lr`; None if it is not there, or is of
        none of these types."""
        value = self.settings.get(key)
        return value if isinstance(value, kinds or object) else None

    def epochs(self, step: int) -> str:
        """Return how many epochs of each source the run had read by a step, as text; empty if that is not
        known."""
        consumed = self.series(SEQUENCES).finite()
        if not len(consumed):
            return ""
        num = float(np.interp(step, consumed.steps, consumed.values))
        return listed([f"{source.epochs(num):.2f} of {source.label}" for source in self.sources])

    def loss_changes(self) -> list[int]:
        """Return the last step before each stage that has begun and whose losses cannot be compared with
        those before it; estimated if not every step is logged."""
        consumed = self.series(SEQUENCES).finite()
        firsts = [stage.first_sequence for stage in self.stages if stage.changes_loss]
        if not len(consumed):
            return []
        steps = np.ceil(np.interp(firsts, consumed.values, consumed.steps))
        return [int(step) for step in steps if step < consumed.steps[-1]]

    def since_start(self, kind: str) -> list[RunEvent]:
        """Return the events of a kind, also of steps that were trained again later. Events from before a
        restart (checkpoint.restart) were of another run."""
        kinds = [event.kind for event in self.events]
        num_before = len(kinds) - kinds[::-1].index("started") if "started" in kinds else 0
        return [event for event in self.events[num_before:] if event.kind == kind]

    def happened(self, *kinds: str) -> list[RunEvent]:
        """Return the events of these kinds whose steps were not trained again later."""
        return [event for event in self.events if event.kind in kinds and not event.is_superseded]

    def resumes(self) -> list[int]:
        """Return the steps after which the run was started again."""
        return sorted({event.step for event in self.happened("resumed")})


def listed(texts: Sequence[str], most: int = MAX_NAMED) -> str:
    """Return the first texts, separated by commas, and `...` if there are more."""
    return ", ".join([*texts[:most], *["..."] * (len(texts) > most)])


def number(value: Any) -> float | None:
    """Return a value of a JSON file as a float, infinite if it is too large; None for a text that is not a
    number, and for anything else."""
    if isinstance(value, str):
        return NON_FINITE.get(value.lower())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else math.inf if value > 0 else -math.inf


def read_run(folder: PurePath, name: str) -> RecordedRun:
    """Read a run folder. Raises ConfigError if it has no metrics.jsonl with a record that could be read."""
    if folder.name == METRICS:
        folder = folder.parent
    if not storage_of(folder).is_folder(folder):
        raise ConfigError(f"{folder}: there is no such run folder")
    problems: list[str] = []
    data = _bytes(folder / METRICS, problems)
    if data is None:
        reason = problems[0] if problems else f"{METRICS} is missing"
        below = folder.glob(f"*/{METRICS}") if isinstance(folder, Path) else ()
        inside = sorted(str(path.parent) for path in below)
        runs = f"; it has the runs {listed(inside)}" if inside else ""
        raise ConfigError(f"{folder} is not a run folder with metrics: {reason}{runs}")
    # Only an edited file has two records of a step: a run moves the first one to SUPERSEDED.
    by_step = {record["step"]: record for record in _metrics(data, METRICS, problems)}
    if not by_step:
        raise ConfigError(f"{folder / METRICS} has no record" + (f": {problems[0]}" if problems else ""))
    superseded = _bytes(folder / SUPERSEDED, problems) or b""
    tree, about = _job(folder, problems)
    settings = toml.flatten(tree)
    events = _bytes(folder / EVENTS, problems, "spikes, rewinds and the like") or b""
    return RecordedRun(
        name=name,
        folder=folder,
        records=[by_step[step] for step in sorted(by_step)],
        superseded=_metrics(superseded, SUPERSEDED, problems),
        settings=settings,
        about=about,
        env=_env(folder, problems),
        samples=_samples(folder, problems),
        checkpoints=_checkpoints(folder / str(settings.get("checkpoint.folder", "checkpoint"))),
        events=events_of(_records(events, EVENTS, problems)),
        stages=_stages(tree.get("stages")),
        sources=_sources(folder, problems),
        expert_loads=_expert_loads(folder, problems),
        problems=problems,
    )


def names_of(folders: Sequence[PurePath]) -> list[str]:
    """Return a short, unique name for each folder: its last parts, as many as all of them need."""
    parts = [(path.resolve() if isinstance(path, Path) else path).parts for path in folders]
    for num in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-num:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{i}: {folder}" for i, folder in enumerate(folders, 1)]


def _read(path: PurePath) -> bytes:
    return read_regular(path) if isinstance(path, Path) else storage_of(path).read(path)


def _object(path: PurePath) -> dict[str, Any]:
    """The JSON object in a file."""
    tree: dict[str, Any] = json_file.parse(_read(path))
    json_file.expect(tree)
    return tree


def _bytes(path: PurePath, problems: list[str], not_known: str = "") -> bytes | None:
    """The content of a file; None if it is missing, or cannot be read. `not_known`: what is not known without
    it; empty: a run may do without it."""
    try:
        return _read(path)
    except FileNotFoundError:
        if not_known:
            problems.append(f"there is no {path.name}: {not_known} are not known")
        return None
    except (OSError, FileFault) as e:
        problems.append(f"{path.name} cannot be read: {getattr(e, 'strerror', None) or e}")
        return None


def _records(data: bytes, name: str, problems: list[str], required: str = "step") -> list[Record]:
    """The lines of a file of JSON lines that are objects with a step and, under the key `required`, a finite
    number."""
    records, damaged = [], []
    for i, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json_file.parse(line.decode())
            json_file.expect(record, step=int)
            value = number(record[required])
            if value is None or not math.isfinite(value) or not 0 <= record["step"] < MAX_STEP:
                raise ValueError
            records.append(record)
        except (KeyError, ValueError):
            damaged.append(i)
    if damaged and damaged[-1] == data.count(b"\n") + 1:  # without an end of its line
        damaged.pop()
        problems.append(f"{name}: the last record was cut short, as by a kill, and is left out")
    if damaged:
        lines = f"{len(damaged)} line{'s' if len(damaged) > 1 else ''}"
        shown = listed([str(i) for i in damaged])
        problems.append(f"{name}: damaged records are left out, in {lines}: {shown}")
    return records


def _metrics(data: bytes, name: str, problems: list[str]) -> list[Record]:
    """The records of metrics.jsonl, with all numbers as floats. Each has the number of tokens."""
    records = _records(data, name, problems, required=TOKENS)
    for record in records:
        numbers = {key: number(value) for key, value in record.items() if key != "step"}
        record |= {key: value for key, value in numbers.items() if value is not None}
    return records


def _job(folder: PurePath, problems: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The tree of job.toml, and the comments at its top."""
    data = _bytes(folder / "job.toml", problems, "settings")
    try:
        text = (data or b"").decode()
        tree = toml.parse(text)
        toml.flatten(tree)
    except (ValueError, RecursionError) as e:
        problems.append(f"job.toml cannot be read: {e}")
        return {}, []
    head = text.partition("\n\n")[0].splitlines()
    return tree, [line[2:] for line in head if line.startswith("# ")]


def _stages(tables: Any) -> list[RecordedStage]:
    """The stages of the job; none if it has no [[stages]], or if their places cannot be read."""
    stages, first, before = list[RecordedStage](), 0, None
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        return []
    for i, table in enumerate(tables, 1):
        name, until = table.get("name"), table.get("until")
        kind = table.get("weights"), table.get("seq_len")
        stages.append(RecordedStage(f"{i} ({name})" if name else f"{i}", first, before not in (None, kind)))
        before, end = kind, re.fullmatch(r"(\d{1,18}) sequences", str(until))
        if end is None:
            return stages if until == "end" else []
        first = int(end[1])
    return []


def _env(folder: PurePath, problems: list[str]) -> dict[str, Any]:
    try:
        return _object(folder / "env.json")
    except FileNotFoundError:
        problems.append("there is no env.json: hardware and versions are not known")
    except (OSError, ValueError) as e:
        problems.append(f"env.json cannot be read: {e}")
    return {}


def _sources(folder: PurePath, problems: list[str]) -> list[SourceShare]:
    """The sources in sources.json."""
    try:
        tree = _object(folder / SOURCES)
        json_file.expect(tree, sources=list)
        return [_source(entry) for entry in tree["sources"]]
    except FileNotFoundError:
        problems.append(f"there is no {SOURCES}: epochs are not known")
    except (OSError, TypeError, ValueError) as e:
        problems.append(f"{SOURCES} cannot be read: {e}")
    return []


def _source(entry: Any) -> SourceShare:
    json_file.expect(entry, source=str, share=float, sequences=int)
    shares = [(int(first), float(share)) for first, share in entry.get("stages", [(0, entry["share"])])]
    if not 0 < entry["sequences"] < MAX_STEP or not all(0 <= share <= 1 for _, share in shares):
        raise ValueError(f"{entry['source']} has no possible share and number of sequences")
    return SourceShare(entry["source"], shares, entry["sequences"])


def _expert_loads(folder: PurePath, problems: list[str]) -> RecordedLoads | None:
    """The newest loads of experts; None if there are none."""
    records = _records(_bytes(folder / EXPERT_LOADS, problems) or b"", EXPERT_LOADS, problems)
    if not records:
        return None
    newest = max(records, key=lambda record: record["step"])
    try:
        tokens_LE = np.array(list(newest["tokens"].values()), np.float64)
        if tokens_LE.ndim != 2 or tokens_LE.min() < 0 or tokens_LE.sum(1).min() < 1:
            raise ValueError
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        problems.append(f"{EXPERT_LOADS}: the loads of step {newest['step']} cannot be read")
        return None
    return RecordedLoads(newest["step"], tokens_LE)


def _samples(folder: PurePath, problems: list[str]) -> dict[int, list[str]]:
    text = (_bytes(folder / SAMPLES, problems) or b"").decode(errors="replace")
    _, *parts = re.split(r"^--- step (\d{1,18})\n", text, flags=re.MULTILINE)
    samples: dict[int, list[str]] = {}
    for step, body in zip(parts[::2], parts[1::2]):
        samples.setdefault(int(step), []).append(body.removesuffix("\n"))
    return samples


def _checkpoints(folder: PurePath) -> list[SavedCheckpoint]:
    """The checkpoints whose manifest can be read; a run that goes on deletes old ones meanwhile."""
    saved = list[SavedCheckpoint]()
    with suppress(OSError, ValueError):
        for step, path in commit.list_committed(folder):
            with suppress(OSError, ValueError, commit.CheckpointError):
                manifest = commit.read_manifest(path)
                digests = manifest.get("digest")
                text = digests.get("weights") if isinstance(digests, dict) else None
                known = text if isinstance(text, str) else ""
                size = commit.total_size(manifest)
                saved.append(SavedCheckpoint(step, size, manifest["ranks"], known))
    return saved
