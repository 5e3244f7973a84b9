"""What ranks tell each other about a checkpoint: the same answers as by gathering everything, without what
many ranks would have to send."""

from __future__ import annotations

import errno
import functools
import operator
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.simulated_ranks import SimulatedRank
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import total_bytes
from titanlite.ranks import Ranks


def of_rank(folder: Path) -> dict[str, Any]:
    """Answers on three ranks, of which ranks 1 and 2 have the same names."""
    rank = dist.get_rank()
    ranks, mine = Ranks(folder), ["a", "b"] if rank == 0 else ["c", "b"]
    tensors = {"model": {name: torch.zeros(4) for name in mine}}
    tensors["optimizer"] = {f"{name}.step": torch.zeros(()) for name in mine}

    def fail(error: Exception) -> list[str]:
        raise error

    disk = OSError(errno.EIO, "Input/output error", "job.toml")
    errors = list[str]()
    for collective in (ranks.from_rank_zero, ranks.scatter):
        for error in (CheckpointError("full"), disk, KeyError("x")):
            with pytest.raises((CheckpointError, OSError, RuntimeError)) as caught:
                collective(functools.partial(fail, error))
            errors.append(f"{caught.type.__name__}: {caught.value}")
    return {
        "union": ranks.union(mine),
        "nobody has one": ranks.union([]),
        "only the last has one": ranks.union(["x"] if rank == 2 else []),
        "merged": ranks.all_reduce([rank], operator.add),
        "first": ranks.first([None, "full", "broken"][rank]),
        "no problem": ranks.first(None),
        "bytes": total_bytes(tensors, ranks),
        "on rank zero": ranks.gather(rank) == ([0, 1, 2] if rank == 0 else None),
        "scattered": ranks.scatter(lambda: ["x", "y", "z"]) == "xyz"[rank],
        "errors": errors,
    }


def test_answers_of_real_ranks(run_on, tmp_path: Path) -> None:
    wanted = {
        "union": ["a", "b", "c"],
        "nobody has one": [],
        "only the last has one": ["x"],
        "merged": [0, 1, 2],
        "first": "full",
        "no problem": None,
        "bytes": 3 * (16 + 4),
        "on rank zero": True,
        "scattered": True,
        "errors": 2
        * [
            "CheckpointError: full",
            "OSError: [Errno 5] Input/output error: 'job.toml'",
            f"RuntimeError: rank 0, {tmp_path}: KeyError: 'x'",
        ],
    }
    assert run_on(3, of_rank, tmp_path) == [wanted] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 1000, 16384])
def test_messages_of_simulated_ranks(size: int) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight.exp_avg" for i in range(20)]
    mail: dict[tuple[int, int], bytes] = {}
    ranks = [SimulatedRank(rank, size, mail) for rank in range(size)]
    # A rank sends only to lower ranks, so that each finds its messages if the last rank begins.
    gathered = [rank.gather(rank.rank) for rank in reversed(ranks)]
    assert gathered == [None] * (size - 1) + [list(range(size))]
    assert set(Counter(sender for sender, _ in mail).values()) <= {1}
    assert max(Counter(receiver for _, receiver in mail).values(), default=0) <= 14

    mail.clear()
    merged = [rank.reduce(frozenset(names), operator.or_) for rank in reversed(ranks)]
    assert merged == [None] * (size - 1) + [frozenset(names)]
    # The same names of many ranks are sent as those of one; gathered values are not.
    assert {len(message) for message in mail.values()} <= {len(pickle.dumps(frozenset(names)))}

    mail.clear()
    assert [rank._scatter(list(range(size)) if rank.rank == 0 else None) for rank in ranks] == [*range(size)]
    assert max(Counter(sender for sender, _ in mail).values(), default=0) <= 14


def test_an_error_of_rank_zero_keeps_its_exit_code_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, told, error = Ranks(tmp_path, alone=True), [], CheckpointError("format 4")
    monkeypatch.setattr(ranks, "_broadcast", told.append)
    with pytest.raises(CheckpointError), ranks.rank_zero_first():
        raise error
    assert told == [error]
