"""What ranks tell each other about a checkpoint: the same answers as by gathering everything, without what
many ranks would have to send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.state import total_bytes
from titanlite.torch_compat import fake_process_group


def of_rank(folder: Path) -> dict[str, Any]:
    """Answers on three ranks, of which ranks 1 and 2 have the same names."""
    ranks, mine = Ranks(folder), ["a", "b"] if dist.get_rank() == 0 else ["c", "b"]
    tensors = {"model": {name: torch.zeros(4) for name in mine}}
    tensors["optimizer"] = {f"{name}.step": torch.zeros(()) for name in mine}
    return {
        "union": ranks.union(mine),
        "nobody has one": ranks.union([]),
        "only the last has one": ranks.union(["x"] if dist.get_rank() == 2 else []),
        "distinct": ranks.distinct(mine),
        "problems": ranks.distinct([None, "full", "full"][dist.get_rank()]),
        "bytes": total_bytes(tensors, ranks),
    }


def test_different_values_of_ranks(run_on, tmp_path: Path) -> None:
    wanted = {
        "union": ["a", "b", "c"],
        "nobody has one": [],
        "only the last has one": ["x"],
        "distinct": [["a", "b"], ["c", "b"]],
        "problems": [None, "full"],
        "bytes": 3 * (16 + 4),
    }
    assert run_on(3, of_rank, tmp_path) == [wanted] * 3


def test_names_of_simulated_ranks_are_not_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 16,384 ranks with the same 3,000 names, which in a gather would take 1.6 GB."""
    ranks = Ranks(tmp_path, alone=True)
    names = [f"model.layers.{i // 9}.self_attn.q_proj.weight.exp_avg.{i}" for i in range(3000)]
    # The group of checkpoints would connect to the other ranks; the fake default group stands for it.
    ranks.distributed, ranks.size = True, 16384
    with fake_process_group(0, 16384):
        monkeypatch.setattr(dist, "all_gather_object", None)
        tensors = {"model": {name: torch.empty(4, device="meta") for name in names}}
        assert ranks.union(names) == sorted(names)
        assert total_bytes(tensors, ranks) == 3000 * 16
        with pytest.raises(TypeError):  # the control
            ranks.gather(names)
