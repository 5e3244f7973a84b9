"""The line on a rank that hangs, from flight records in the formats of NCCL and of gloo. NCCL's are made here
by the description in torch's header, version 2.10."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest

from titanlite.runtime.hang import (
    POSITION_BYTES,
    describe_hang,
    keep_position,
    read_flight_record,
    read_position,
    write_flight_record,
)
from titanlite.step_clock import Phase

SHARDS, REPLICAS = ("1", "mesh_dp_shard"), ("2", "mesh_dp_replicate")
DEFAULT = ("0", "default_pg")


def entry(
    group: tuple[str, str], operation: str, number: int, state: str = "completed", **fields: Any
) -> dict:
    """One entry of a flight record, with the fields that are read and some others."""
    return {
        "process_group": group,
        "profiling_name": operation,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "retired": state == "completed",
        "state": state,
        "time_created_ns": 1000 * number,
        "timeout_ms": 600_000,
        "input_sizes": [[8]],
        "frames": [{"name": "f", "filename": "g.py", "line": 1}],
        "duration_ms": 0.5,
        **fields,
    }


def nccl_dump(entries: list[dict], **groups: list[int]) -> dict:
    """A dump of NCCL, with the ranks of each group by name."""
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in groups.items()}
    status = {"0": {"last_enqueued_collective": 9, "last_completed_collective": 9}}
    return {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries}


def leave_nccl(folder: Path, rank: int, entries: list[dict], **groups: list[int]) -> None:
    """The file that NCCL writes at a timeout."""
    (folder / f"nccl-{rank}").write_bytes(pickle.dumps(nccl_dump(entries, **groups), protocol=2))


def leave_gloo(folder: Path, rank: int, entries: list[dict], groups: dict[str, list[int]]) -> None:
    """The file of a rank on gloo, whose record names no groups."""
    dump = {
        "version": "2.10",
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[0, 1]"}},
        "entries": entries,
    }
    write_flight_record(str(folder), rank, json.dumps(dump), groups)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the user's."""
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)


def test_nccl_the_rank_that_has_not_enqueued_the_collective_is_missing(tmp_path: Path) -> None:
    """The hosts of the others have gone on, to later collectives of the same and of another group."""
    groups: dict[str, Any] = {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}
    done = [entry(DEFAULT, "nccl:all_reduce", 6), entry(SHARDS, "nccl:_all_gather_base", 56)]
    for rank in (0, 1, 3):
        waits = [
            entry(SHARDS, "nccl:_all_gather_base", 57, "scheduled", time_created_ns=500),
            entry(SHARDS, "nccl:_reduce_scatter_base", 58, "scheduled", time_created_ns=600),
            entry(DEFAULT, "nccl:all_reduce", 7, "scheduled", time_created_ns=700),
        ]
        leave_nccl(tmp_path, rank, done + waits, **groups)
    leave_nccl(tmp_path, 2, done, **groups)
    for rank, phase in enumerate(("end", "end", "data", "end")):
        keep = keep_position(str(tmp_path), rank)
        assert keep is not None
        keep(12, phase)
    assert describe_hang(tmp_path, range(4), silent=[2], timed_out=False) == (
        "rank 2 is missing from all_gather_base number 57 (mesh_dp_shard, ranks 0, 1, 2 and 3), in which "
        "ranks 0, 1 and 3 wait: rank 2 is in step 12, waiting for data; rank 0 is in step 12, at the step's "
        "end, where results are read, logged and saved"
    )


def test_a_rank_that_waits_elsewhere_is_not_the_cause(tmp_path: Path) -> None:
    """Ranks 0 and 1 are shards, and so are 2 and 3. Rank 3 hangs: 2 waits for it, and 0 waits for 2."""
    for rank, pair in ((0, [0, 2]), (2, [2, 3])):
        group = REPLICAS if rank == 0 else SHARDS
        began = {"time_created_ns": 100 if rank == 0 else 200}
        leave_nccl(
            tmp_path, rank, [entry(group, "nccl:all_reduce", 5, "started", **began)], **{group[0]: pair}
        )
    line = describe_hang(tmp_path, range(4), silent=[3], timed_out=False)
    assert line.startswith(
        "rank 3 is missing from all_reduce number 5 (mesh_dp_shard, ranks 2 and 3), in which"
    )


def test_gloo_the_last_collective_is_the_one_that_failed(tmp_path: Path) -> None:
    """Its thread may have retired it before the record is taken. The state is always "scheduled"."""
    for retired in (False, True):
        entries = [
            entry(DEFAULT, "gloo:all_reduce", 4, "scheduled", retired=True),
            entry(SHARDS, "gloo:_all_gather_base", 9, "scheduled", retired=retired),
        ]
        leave_gloo(tmp_path, 0, entries, {"0": [0, 1], "1": [0, 1]})
        line = describe_hang(tmp_path, range(2), silent=[1], timed_out=True)
        assert line == (
            "rank 1 is missing from all_gather_base number 9 (mesh_dp_shard, ranks 0 and 1), in which "
            "rank 0 waits: rank 1 is before the first step; rank 0 is before the first step"
        )


def test_without_records_the_position_is_left(tmp_path: Path) -> None:
    assert describe_hang(tmp_path, range(3), silent=[1], timed_out=True) == (
        "rank 1 is missing from a collective, in which ranks 0 and 2 wait: "
        "rank 1 is before the first step; rank 0 is before the first step"
    )


def test_nothing_is_said_of_what_is_not_known(tmp_path: Path) -> None:
    """An abort for another reason; a collective that all have entered; one whose other ranks are on another
    node."""
    assert describe_hang(tmp_path, range(2), silent=[1], timed_out=False) == ""
    for rank in (0, 1):
        leave_nccl(tmp_path, rank, [entry(DEFAULT, "nccl:all_reduce", 7, "started")], **{"0": [0, 1]})
    assert describe_hang(tmp_path, range(2), silent=[], timed_out=False) == ""
    for rank in (0, 1):
        leave_nccl(tmp_path, rank, [entry(DEFAULT, "nccl:all_reduce", 7, "started")], **{"0": [0, 1, 2, 3]})
    assert describe_hang(tmp_path, range(2), silent=[], timed_out=False) == ""


def test_other_nodes_are_named(tmp_path: Path) -> None:
    leave_nccl(tmp_path, 0, [entry(DEFAULT, "nccl:all_reduce", 7, "started")], **{"0": [0, 1, 2, 3]})
    line = describe_hang(tmp_path, range(2), silent=[1], timed_out=False)
    assert line.endswith("; for ranks 2 and 3 see the logs of other nodes")


def test_sends_and_receives_are_left_out(tmp_path: Path) -> None:
    waits = entry(DEFAULT, "nccl:recv 0<-1", 0, "started", is_p2p=True)
    leave_nccl(tmp_path, 0, [waits], **{"0": [0, 1]})
    assert describe_hang(tmp_path, range(2), silent=[1], timed_out=False) == ""


class Bomb:
    """Its pickle runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_a_record_that_is_no_record_is_ignored_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = nccl_dump([entry(DEFAULT, "nccl:all_reduce", 7)], **{"0": [0, 1]})
    for data in (
        b"",
        b"\x80",
        pickle.dumps([1]),
        pickle.dumps(good | {"x": Bomb()}),
        pickle.dumps({"entries": []}),
    ):
        (tmp_path / "nccl-0").write_bytes(data)
        assert read_flight_record(tmp_path, 0) is None
    assert not Path("exploded").exists()
    (tmp_path / "nccl-0").write_bytes(pickle.dumps(good))  # control
    assert read_flight_record(tmp_path, 0) is not None


def test_the_users_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "mine_"))
    dump = nccl_dump([entry(DEFAULT, "nccl:all_reduce", 7)], **{"0": [0, 1]})
    (tmp_path / "mine_0").write_bytes(pickle.dumps(dump))
    assert read_flight_record(tmp_path / "launcher", 0) is not None


def test_positions_are_whole_and_need_a_launcher(tmp_path: Path) -> None:
    keep = keep_position(str(tmp_path), 3)
    assert keep is not None
    assert (tmp_path / "position-3").stat().st_blocks, "a full disk would end the run by SIGBUS"
    assert read_position(tmp_path, 3) == "before the first step"
    for step, phase in ((1, "forward_backward"), (10**9, "data")):
        keep(step, phase)
        assert (tmp_path / "position-3").stat().st_size == POSITION_BYTES
    assert read_position(tmp_path, 3) == "in step 1000000000, waiting for data"
    for phase in get_args(Phase):
        keep(1, phase)
        assert read_position(tmp_path, 3).removeprefix("in step 1, ") != phase, "a phase without words"
    assert keep_position(None, 0) is None
    assert keep_position(str(tmp_path / "missing"), 0) is None
