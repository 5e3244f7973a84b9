"""Which rank is missing from a collective that timed out.

Each rank keeps its position (step and phase) in a file of the launcher's folder, in memory that survives the
rank. A rank whose collective fails leaves its flight record there, torch's list of its last collectives: gloo
ranks write it themselves, NCCL writes it at a timeout. The launcher compares the records of its node's
ranks."""

from __future__ import annotations

import io
import json
import mmap
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from titanlite.runtime.environment import flight_record_prefix
from titanlite.step_clock import Phase

POSITION_BYTES = 64
PHASES: dict[str, str] = {  # by Phase
    "data": "waiting for data",
    "start": "before the forward",
    "forward": "in the forward",
    "statistics": "in the statistics of token losses",
    "backward": "in the backward",
    "forward_backward": "in the forward or backward",
    "optimizer": "in the gradient norm or the optimizer's step",
    "end": "at the step's end, where results are read, logged and saved",
}


def keep_position(folder: str | None, rank: int) -> Callable[[int, Phase], None] | None:
    """Return a function that notes a step and a phase in `rank`'s file in the launcher's folder. It writes to
    memory, which takes about a microsecond. None without a launcher, or if the file cannot be made."""
    if folder is None:
        return None
    try:
        with open(_position_file(folder, rank), "w+b", buffering=0) as file:
            # On a full disk this is an error; writing to memory of a sparse file would be a SIGBUS.
            file.write(bytes(POSITION_BYTES))
            memory = mmap.mmap(file.fileno(), POSITION_BYTES)
    except OSError:
        return None

    def keep(step: int, phase: Phase) -> None:
        memory[:] = f"{step} {phase}".encode().ljust(POSITION_BYTES, b"\0")

    return keep


def read_position(folder: str | Path, rank: int) -> str:
    """The step and the phase of a rank, in words."""
    try:
        text = _position_file(folder, rank).read_bytes().rstrip(b"\0").decode()
        step, phase = text.split()
    except (OSError, ValueError):
        return "before the first step"
    return f"in step {step}, {PHASES.get(phase, phase)}"


def _position_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"position-{rank}"


class Group(NamedTuple):
    """A process group, as torch names and describes it."""

    name: str
    description: str
    ranks: tuple[int, ...]


class Collective(NamedTuple):
    """One collective. `number` counts the collectives of its group. `began_ns`: time at which the rank began
    it."""

    group: Group
    operation: str
    number: int
    began_ns: int

    def __str__(self) -> str:
        name = self.group.description
        name = "" if name in ("", "default_pg") else f"{name}, "
        return f"{self.operation} number {self.number} ({name}{name_ranks(self.group.ranks)})"


@dataclass(frozen=True)
class FlightRecord:
    """The collectives of one rank. `entered`: the number of the last one that the rank has begun, by group.
    `pending`: the first one that is not done, by group."""

    entered: dict[Group, int]
    pending: dict[Group, Collective]

    @classmethod
    def from_dump(cls, dump: Mapping[str, Any]) -> FlightRecord:
        """Read a dump of torch's flight recorder, version 2. Raises KeyError, TypeError or ValueError for
        something else. Sends and receives are left out, because torch numbers them separately. The last
        collective of a rank on gloo is the one whose error ends the rank."""
        ranks = {name: tuple(json.loads(group["ranks"])) for name, group in dump["pg_config"].items()}
        record = cls({}, {})
        for entry in dump["entries"]:
            name, description = entry["process_group"]
            if entry["is_p2p"] or name not in ranks:
                continue
            group, number = Group(name, description, ranks[name]), int(entry["collective_seq_id"])
            backend, _, operation = entry["profiling_name"].partition(":")
            record.entered[group] = max(record.entered.get(group, 0), number)
            is_done = entry["state"] == "completed"
            if backend == "gloo":  # it notes by `retired` only that a collective has ended, or has failed
                is_done = entry["retired"] and entry is not dump["entries"][-1]
            if not is_done and (group not in record.pending or number < record.pending[group].number):
                began_ns = int(entry["time_created_ns"])
                record.pending[group] = Collective(group, operation.lstrip("_"), number, began_ns)
        return record


def write_flight_record(
    folder: str | None, rank: int, dump: str | None, groups: Mapping[str, list[int]]
) -> None:
    """Leave gloo's flight record, a `dump` in JSON, in the launcher's folder. `groups`: the ranks of this
    rank's process groups by name, which gloo's dump lacks."""
    if folder is None or dump is None:
        return
    with suppress(OSError, ValueError):  # the rank's own error is what counts
        record = json.loads(dump)
        record["pg_config"] = {name: {"ranks": json.dumps(ranks)} for name, ranks in groups.items()}
        (Path(folder) / f"gloo-{rank}").write_text(json.dumps(record), encoding="utf-8")


def read_flight_record(folder: str | Path, rank: int) -> FlightRecord | None:
    """The record of a rank; None if it has left none that can be read. NCCL's comes first: a rank with both
    computes on a GPU."""
    nccl, gloo = Path(f"{flight_record_prefix(str(folder))}{rank}"), Path(folder) / f"gloo-{rank}"
    for path, load in ((nccl, _load_pickle), (gloo, json.loads)):
        with suppress(OSError, KeyError, TypeError, ValueError, pickle.UnpicklingError, EOFError):
            return FlightRecord.from_dump(load(path.read_bytes()))
    return None


class _PlainUnpickler(pickle.Unpickler):
    """Reads pickles of dicts, lists, strings and numbers only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight record")


def _load_pickle(data: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(data)).load()


class Missing(NamedTuple):
    """A collective in which `waiting` wait for `ranks`."""

    ranks: tuple[int, ...]
    collective: Collective
    waiting: tuple[int, ...]


def find_missing(records: Mapping[int, FlightRecord], silent: Sequence[int]) -> Missing | None:
    """Return the collective that could not begin, and the ranks that have not entered it; None if all known
    ranks have entered each pending collective.

    `records`: by rank. `silent`: ranks of this node that run and have left no record. A rank that is missing
    from one group may wait in another one: then the rank that it waits for is the cause. Of several
    collectives that a rank is missing from, the oldest is the one in which the others wait."""
    pending = [collective for record in records.values() for collective in record.pending.values()]
    gaps = []
    for group in {collective.group for collective in pending}:
        first = min((one for one in pending if one.group == group), key=lambda one: one.number)
        missing = tuple(
            rank
            for rank in group.ranks
            if rank in silent or (rank in records and records[rank].entered.get(group, 0) < first.number)
        )
        if missing:
            waiting = tuple(sorted(rank for rank, record in records.items() if group in record.pending))
            gaps.append(Missing(missing, first, waiting))
    waits = {rank for gap in gaps for rank in gap.waiting}
    return max(gaps, key=lambda gap: (waits.isdisjoint(gap.ranks), -gap.collective.began_ns), default=None)


def describe_hang(folder: str | Path, ranks: Sequence[int], silent: Sequence[int], timed_out: bool) -> str:
    """One line on the rank for which the others wait; "" if unknown.

    `ranks`: the ranks of this node. `silent`: those that run and have left no error note. `timed_out`: a rank
    has said that a collective timed out."""
    records = {rank: record for rank in ranks if (record := read_flight_record(folder, rank)) is not None}
    silent = [rank for rank in silent if rank not in records]
    gap = find_missing(records, silent)
    elsewhere: list[int] = []
    if gap is not None:
        missing, waiting = gap.ranks, gap.waiting
        name = str(gap.collective)
        elsewhere = [rank for rank in gap.collective.group.ranks if rank not in ranks]
    elif silent and timed_out:
        missing, waiting, name = tuple(silent), tuple(set(ranks) - set(silent)), "a collective"
    else:
        return ""
    where = [f"rank {rank} is {read_position(folder, rank)}" for rank in (*missing, *waiting[:1])]
    if elsewhere:
        where.append(f"for {name_ranks(elsewhere)} see the logs of other nodes")
    is_or_are, wait = "is" if len(missing) == 1 else "are", "waits" if len(waiting) == 1 else "wait"
    text = f"{name_ranks(missing)} {is_or_are} missing from {name}, in which {name_ranks(waiting)} {wait}: "
    return text + "; ".join(where)


def name_ranks(ranks: Sequence[int]) -> str:
    """For example "rank 3", or "ranks 0, 2 and 3"."""
    *most, last = [str(rank) for rank in sorted(ranks)]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
