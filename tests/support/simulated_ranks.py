"""Many ranks in one process: their messages, the plans of their saves, and the sockets of their gloo group.

`python -m tests.support.simulated_ranks N` prints connect(N)."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from titanlite.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
# Llama 3 405B
DIM, HIDDEN, KV_DIM, BLOCKS_PER_STAGE = 16384, 53248, 1024, 8
BLOCK = {  # shape, and the dim that tensor parallel shards
    "self_attn.q_proj": ((DIM, DIM), 0),
    "self_attn.k_proj": ((KV_DIM, DIM), 0),
    "self_attn.v_proj": ((KV_DIM, DIM), 0),
    "self_attn.o_proj": ((DIM, DIM), 1),
    "mlp.gate_proj": ((HIDDEN, DIM), 0),
    "mlp.up_proj": ((HIDDEN, DIM), 0),
    "mlp.down_proj": ((DIM, HIDDEN), 1),
    "input_layernorm": ((DIM,), None),
    "post_attention_layernorm": ((DIM,), None),
}


class Layout(NamedTuple):
    """Degrees, from the outermost in."""

    pp: int
    replicas: int
    shards: int
    tp: int

    @property
    def num_ranks(self) -> int:
        return self.pp * self.replicas * self.shards * self.tp

    @property
    def num_shards(self) -> int:
        """Different shards of all tensors: weights, two moments, and the step of each parameter."""
        tp = [1 if dim is None else self.tp for _, dim in BLOCK.values()]
        return self.pp * BLOCKS_PER_STAGE * sum(3 * self.shards * n + 1 for n in tp)


class SimulatedRank(Ranks):
    """One of many ranks in this process. `mail`: pickled messages by (sender, receiver). Ranks
    tell lower ranks, and scatter to higher ones, so that a collective can run rank by rank."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], bytes]):
        super().__init__(Path(), alone=True)
        self.rank, self.size, self.mail = rank, size, mail

    def _send(self, value: Any, rank: int) -> None:
        self.mail[self.rank, rank] = pickle.dumps(value)

    def _receive(self, rank: int) -> Any:
        return pickle.loads(self.mail[rank, self.rank])


def connections(num_ranks: int, lazy: bool) -> dict[str, Any]:
    """Make a group of `num_ranks` ranks, which are threads of a new process."""
    env = {**os.environ, "TORCH_GLOO_LAZY_INIT": str(int(lazy)), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.support.simulated_ranks", str(num_ranks)]
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return {"num_ranks": num_ranks, "lazy": lazy, **json.loads(child.stdout)}


def connect(num_ranks: int) -> dict[str, Any]:
    """Sockets per rank of a gloo group, when it is made and after a broadcast, and the time."""
    store, groups = dist.HashStore(), [None] * num_ranks

    def on_threads(act: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=300))

    def broadcast(rank: int) -> None:
        groups[rank].broadcast(torch.ones(100), 0).wait()

    def sockets_per_rank() -> float:
        return round(len(os.listdir("/proc/self/fd")) / num_ranks, 1)

    began = time.process_time()
    on_threads(make)
    time_s = round(time.process_time() - began, 3)
    made = sockets_per_rank()
    on_threads(broadcast)
    return {"cpu_s": time_s, "sockets_per_rank": made, "after_a_broadcast": sockets_per_rank()}


def local_items(layout: Layout, stage: int, replica: int, shard: int, tp: int) -> list[WriteItem]:
    """What DCP plans for one rank. `replica` changes nothing."""
    items = []
    for block in range(stage * BLOCKS_PER_STAGE, (stage + 1) * BLOCKS_PER_STAGE):
        for name, (shape, tp_dim) in BLOCK.items():
            sizes, offsets = list(shape), [0] * len(shape)
            for dim, degree, coordinate in ((tp_dim, layout.tp, tp), (0, layout.shards, shard)):
                if dim is not None:
                    sizes[dim] //= degree
                    offsets[dim] += sizes[dim] * coordinate
            weight = f"layers.{block}.{name}.weight"
            for full in (f"model.{weight}", f"optimizer.{weight}.exp_avg", f"optimizer.{weight}.exp_avg_sq"):
                items.append(item(full, offsets, sizes, list(shape), WriteItemType.SHARD))
            items.append(item(f"optimizer.{weight}.step", [], [], [], WriteItemType.TENSOR))
    return items


def item(name: str, offsets: list[int], sizes: list[int], shape: list[int], kind: WriteItemType) -> WriteItem:
    """One shard of one tensor, in a plan."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), kind, tensor_data=data)


def local_plans(layout: Layout) -> Iterator[SavePlan]:
    """The plans of all ranks, in the order of the ranks."""
    for stage in range(layout.pp):
        for replica in range(layout.replicas):
            for shard in range(layout.shards):
                for tp in range(layout.tp):
                    items = local_items(layout, stage, replica, shard, tp)
                    names = {i.index.fqn: tuple(i.index.fqn.split(".", 1)) for i in items}
                    yield SavePlan(items, planner_data=names)


if __name__ == "__main__":
    print(json.dumps(connect(int(sys.argv[1]))))
