"""What grows with the number of ranks outside of the training step: gloo's connections, the plan of a save,
what ranks tell rank 0, manifests, and Muon's exchange. Ranks are simulated in one process, on a CPU.

    python benchmarks/many_ranks.py --output benchmarks/results/many_ranks_2_cores.json

Two of the 16 pipeline stages of Llama 3 405B are measured, on 128 ranks (dp_replicate 2 x dp_shard 4 x tp 8),
in process time, because other programs may run beside it. All stages on 1,024 ranks (the same degrees) and on
16,384 ranks (dp_replicate 8 x dp_shard 16) are computed. For `dcp.save`, torch's own planner on the plans of
all ranks, which stands for the code before, rank 0's costs grow with the shards on all ranks; all other costs
grow with the number of different shards."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (  # noqa: E402
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult  # noqa: E402

from benchmarks.environment import write_result  # noqa: E402
from titanlite.checkpoint import commit, save_plan  # noqa: E402
from titanlite.checkpoint.digest import FileDigest  # noqa: E402
from titanlite.checkpoint.ranks import Ranks  # noqa: E402
from titanlite.checkpoint.save_plan import LocalShards, ShardOwners, WriteReport  # noqa: E402
from titanlite.checkpoint.writer import ShardWriter  # noqa: E402
from titanlite.optim.exchange import Region, _first_ranks  # noqa: E402
from titanlite.torch_compat import storage_info  # noqa: E402

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


MEASURED = Layout(2, 2, 4, 8)
COMPUTED = {"at_1024": Layout(16, 2, 4, 8), "at_16384": Layout(16, 8, 16, 8)}


class SimulatedRank(Ranks):
    """One of many ranks in this process. `mail`: pickled messages by (sender, receiver). Ranks
    tell lower ranks, and scatter to higher ones, so that a collective can run rank by rank."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], bytes]):
        super().__init__(Path(), alone=True)
        self.distributed, self.rank, self.size, self.mail = True, rank, size, mail

    def _send(self, value: Any, rank: int) -> None:
        self.mail[self.rank, rank] = pickle.dumps(value)

    def _receive(self, rank: int) -> Any:
        return pickle.loads(self.mail[rank, self.rank])


def main() -> None:
    """Run all measurements and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--connect", type=int, help=argparse.SUPPRESS)  # a child process
    args = parser.parse_args()
    if args.connect:
        print(json.dumps(connect(args.connect)))
        return
    result = {
        "gloo": [connections(n, lazy) for n in (32, 64, 128) for lazy in (False, True)],
        "dcp.save": dcp_save(),
        "save": saves(),
        "manifest": manifest(16384),
        "muon": muon(),
    }
    print(json.dumps(result, indent=1))
    if args.output:
        write_result(args.output, result, "torch")


def cpu_s(act: Callable[[], Any]) -> tuple[float, Any]:
    """The process time of a call, and its result."""
    began = time.process_time()
    result = act()
    return round(time.process_time() - began, 3), result


def with_computed(costs: dict[str, float], all_copies: Sequence[str] = ()) -> dict[str, Any]:
    """Costs on MEASURED, and computed for the layouts of all stages: `all_copies` are proportional to the
    number of shards on all ranks, all other costs to the number of different shards."""
    result: dict[str, Any] = {"measured": costs}
    for name, layout in COMPUTED.items():
        per_copy = layout.num_ranks / MEASURED.num_ranks
        per_shard = layout.num_shards / MEASURED.num_shards
        computed = {key: cost * (per_copy if key in all_copies else per_shard) for key, cost in costs.items()}
        result[name] = {key: round(cost, 1) for key, cost in computed.items()}
    return result


# ---- gloo


def connections(num_ranks: int, lazy: bool) -> dict[str, Any]:
    """Make a group of `num_ranks` ranks, which are threads of a new process."""
    env = {**os.environ, "TORCH_GLOO_LAZY_INIT": str(int(lazy)), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--connect", str(num_ranks)]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
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

    time_s, _ = cpu_s(lambda: on_threads(make))
    made = sockets_per_rank()
    on_threads(broadcast)
    return {"cpu_s": time_s, "sockets_per_rank": made, "after_a_broadcast": sockets_per_rank()}


# ---- saves


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


def dcp_save() -> dict[str, Any]:
    """What rank 0 does at every save in torch's `dcp.save`, and what every rank does with its metadata."""
    pickles = [pickle.dumps(plan) for plan in local_plans(MEASURED)]
    received = max(map(len, pickles)) * len(pickles)  # gather_object pads to the longest
    read_s, plans = cpu_s(lambda: [pickle.loads(data) for data in pickles])
    plan_s, (plans, metadata) = cpu_s(lambda: DefaultSavePlanner().create_global_plan(plans))
    data = pickle.dumps(metadata)
    every_s, _ = cpu_s(lambda: pickle.loads(data))
    costs = {
        "rank_0_receives_bytes": received,
        "rank_0_plans_cpu_s": read_s + plan_s,
        "every_rank_receives_bytes": len(data),
        "every_rank_unpickles_cpu_s": every_s,
    }
    return with_computed(costs, ["rank_0_receives_bytes", "rank_0_plans_cpu_s"])


def saves() -> dict[str, Any]:
    """What rank 0 does in the first save of a run, and in every save."""
    size, mail = MEASURED.num_ranks, dict[tuple[int, int], bytes]()
    plans = list(local_plans(MEASURED))
    for rank in reversed(range(size)):
        shards = {item.index: ShardOwners(item, i, [rank]) for i, item in enumerate(plans[rank].items)}
        local = LocalShards(shards, plans[rank].planner_data, None)
        merged_by = partial(SimulatedRank(rank, size, mail).reduce, local, save_plan.merge)
        merge_s, merged = cpu_s(merged_by)
        plans.pop()
    received = sum(len(message) for (_, receiver), message in mail.items() if receiver == 0)
    mail.clear()
    with tempfile.TemporaryDirectory() as folder:
        writer, plans_of_run = ShardWriter(Path(folder)), save_plan.SavePlans(SimulatedRank(0, size, mail))
        writer.set_up_storage_writer(True)
        plan_s, plans = cpu_s(lambda: plans_of_run._global_plan(merged, DefaultSavePlanner(), writer))
        scatter_s, _ = cpu_s(lambda: SimulatedRank(0, size, mail)._scatter(plans))
        sent = sum(map(len, mail.values()))
        mail.clear()
        written = [pickle.dumps(written_by(rank, plan)) for rank, plan in enumerate(plans)]
        mail[1, 0] = pickle.dumps(written)  # the same bytes as in all messages to rank 0
        read_s, results = cpu_s(lambda: [pickle.loads(data) for data in pickle.loads(mail[1, 0])])
        finish_s, _ = cpu_s(lambda: plans_of_run.finish(writer, results))
        metadata_bytes = (Path(folder) / ".metadata").stat().st_size
    costs = {
        "first_rank_0_receives_bytes": received,
        "first_rank_0_sends_bytes": sent,
        "first_rank_0_cpu_s": merge_s + plan_s + scatter_s,
        "every_rank_0_receives_bytes": len(mail[1, 0]),
        "every_rank_0_cpu_s": read_s + finish_s,
        ".metadata_bytes": metadata_bytes,
    }
    return with_computed(costs)


def written_by(rank: int, plan: SavePlan) -> WriteReport:
    """What a rank tells rank 0 after it has written its shards."""
    name = f"__{rank}_0.distcp"
    results = [WriteResult(item.index, 1 << 20, storage_info(name, i << 20, 1 << 20))
               for i, item in enumerate(plan.items)]  # fmt: skip
    return WriteReport(results, {name: FileDigest(1 << 30, f"{rank:064x}")}, None)


def manifest(num_files: int) -> dict[str, Any]:
    """The manifest of a checkpoint of `num_files` shards: written, and read."""
    files = {f"__{i}_0.distcp": {"size": 300_000_000, "sha256": f"{i:064x}"} for i in range(num_files)}
    about = {"format": commit.FORMAT, "step": 1, "saved_at": "", "ranks": num_files, "files": files}
    write_s, text = cpu_s(lambda: commit.manifest_text(about))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / commit.MANIFEST).write_text(text)
        read_s, _ = cpu_s(lambda: commit.read_manifest(Path(folder)))
    return {"num_files": num_files, "bytes": len(text), "write_cpu_s": write_s, "read_cpu_s": read_s}


# ---- Muon


def muon() -> list[dict[str, Any]]:
    """Muon's exchange of one pipeline stage: the regions of all ranks of the stage."""
    results = []
    for num_ranks in (64, 1024, 16384):
        regions = [Region((i, 0), (1, DIM)) for i in range(num_ranks)]
        find_s, _ = cpu_s(lambda regions=regions: [_first_ranks(regions) for _ in range(10)])
        of_rank = [Region((i, 0), (1, DIM)) for i in range(7 * BLOCKS_PER_STAGE)]
        num_bytes = num_ranks * len(pickle.dumps(of_rank))
        results.append({"ranks_of_a_stage": num_ranks, "cpu_s_of_56_matrices": round(find_s * 5.6, 2),
                        "every_rank_receives_bytes": num_bytes})  # fmt: skip
    return results


if __name__ == "__main__":
    main()
