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
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.planner import SavePlan  # noqa: E402
from torch.distributed.checkpoint.storage import WriteResult  # noqa: E402

from benchmarks.environment import write_result  # noqa: E402
from tests.support.simulated_ranks import (  # noqa: E402
    BLOCKS_PER_STAGE,
    DIM,
    Layout,
    SimulatedRank,
    connections,
    local_plans,
)
from titanlite.checkpoint import commit, save_plan  # noqa: E402
from titanlite.checkpoint.digest import FileDigest  # noqa: E402
from titanlite.checkpoint.save_plan import LocalShards, ShardOwners, WriteReport  # noqa: E402
from titanlite.checkpoint.writer import ShardWriter  # noqa: E402
from titanlite.optim.exchange import Region, first_ranks  # noqa: E402
from titanlite.torch_compat import storage_info  # noqa: E402

MEASURED = Layout(2, 2, 4, 8)
COMPUTED = {"at_1024": Layout(16, 2, 4, 8), "at_16384": Layout(16, 8, 16, 8)}


def main() -> None:
    """Run all measurements and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
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


# ---- saves


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
    return WriteReport(results, {name: FileDigest(1 << 30, f"{rank:064x}")}, None, hashed=[])


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
        find_s, _ = cpu_s(lambda regions=regions: [first_ranks(regions) for _ in range(10)])
        of_rank = [Region((i, 0), (1, DIM)) for i in range(7 * BLOCKS_PER_STAGE)]
        num_bytes = num_ranks * len(pickle.dumps(of_rank))
        results.append({"ranks_of_a_stage": num_ranks, "cpu_s_of_56_matrices": round(find_s * 5.6, 2),
                        "every_rank_receives_bytes": num_bytes})  # fmt: skip
    return results


if __name__ == "__main__":
    main()
