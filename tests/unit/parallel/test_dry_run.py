"""A dry run makes the model of every rank as the ranks do, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.support.models import family
from tests.support.tiers import full
from titanlite.losses import CrossEntropy
from titanlite.mesh import build_mesh, local_shard
from titanlite.parallel import dry_run
from titanlite.parallel.apply import parallelize
from titanlite.parallel.dry_run import PipelineRank, RankModel, model_of_rank
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Degrees, Parallelism

KEYS = {
    "pp": "pipeline_parallel_degree", "replicate": "data_parallel_replicate_degree",
    "cp": "context_parallel_degree", "tp": "tensor_parallel_degree", "schedule": "pipeline_parallel_schedule",
}  # fmt: skip
SHAPE = {"dim": 40, "n_layers": 4, "tie_word_embeddings": False}  # 40 rows: uneven over 3 and 6 ranks


def settings_of(**layout: Any) -> ParallelSettings:
    return ParallelSettings(parallelism=Parallelism(**{KEYS[key]: value for key, value in layout.items()}))


def make_net() -> Any:
    return family(**SHAPE).build_on_meta()


def simulated(num_ranks: int, **layout: Any) -> list[PipelineRank]:
    return dry_run.dry_run(make_net, CrossEntropy(), settings_of(**layout), num_ranks)


LAYOUTS = [
    full(1, {}), full(6, {}), (12, {"replicate": 2, "tp": 2}), full(8, {"pp": 2, "cp": 2, "tp": 2}),
    (4, {"pp": 2, "schedule": "ZBVZeroBubble"}),
]  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS, ids=str)
def test_the_shards_of_all_ranks_are_the_model(num_ranks: int, layout: dict[str, Any]) -> None:
    settings, tp = settings_of(**layout), layout.get("tp", 1)
    models = [
        model_of_rank(make_net(), CrossEntropy(), settings, rank, num_ranks) for rank in range(num_ranks)
    ]
    assert not dist.is_initialized()
    whole = dict(make_net().named_parameters())
    copies = {name: tp if "norm" in name else 1 for name in whole}  # tensor parallel replicates norms
    total = sum(p.numel() * copies[name] for name, p in whole.items()) * layout.get("replicate", 1)
    assert sum(model.num_parameters for model in models) == total
    for group in simulated(num_ranks, **layout):
        alike = models[group.first.rank : group.last.rank + 1]
        assert [group.first, group.last] == [alike[0], alike[-1]]
        assert group.first.num_parameters == max(model.num_parameters for model in alike)
        assert group.last.num_parameters == min(model.num_parameters for model in alike)


def test_pipeline_ranks_that_differ_only_in_names_are_counted() -> None:
    first, second, last = simulated(8, pp=4)
    assert [list(rank.stages) for rank in (first, second, last)] == [[0], [1], [3]]
    assert [rank.num_alike for rank in (first, second, last)] == [0, 1, 0]
    assert (second.first.rank, second.last.rank) == (2, 3)
    assert second.describe().startswith("ranks 2 to 3: stage 2 of 4 with block 1, ")
    assert second.describe().endswith(" parameters per rank; 1 other pipeline rank(s) alike")


def sizes_on_rank(layout: dict[str, Any]) -> int:
    """The number of elements of this rank's shards, in a real process group."""
    settings = settings_of(**layout)
    mesh = build_mesh(settings.parallelism, "cpu", dist.get_rank(), dist.get_world_size())
    model = parallelize(make_net(), CrossEntropy(), mesh, settings)
    return sum(local_shard(p).numel() for p in model.net.parameters())


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [full(3, {}), full(4, {"pp": 2, "tp": 2}), full(6, {"tp": 2})], ids=str
)
def test_real_ranks_have_the_same_shards(run_on, num_ranks: int, layout: dict[str, Any]) -> None:
    settings = settings_of(**layout)
    wanted = [
        model_of_rank(make_net(), CrossEntropy(), settings, rank, num_ranks).num_parameters
        for rank in range(num_ranks)
    ]
    assert run_on(num_ranks, sizes_on_rank, layout) == wanted


def warnings(degrees: Degrees, num_node_ranks: int = 8, size: int = 100) -> list[str]:
    model = RankModel(0, size, 100.0)
    return dry_run.warnings([PipelineRank({0: ["0"]}, 1, model, model)], degrees, num_node_ranks)


def test_tensor_parallel_across_nodes_is_warned_about() -> None:
    assert warnings(Degrees(1, 1, 8, 1, 8)) == []
    assert warnings(Degrees(1, 1, 1, 1, 16), num_node_ranks=16) == []
    assert warnings(Degrees(1, 1, 1, 1, 3)) == [], "all on one node"
    for tp in (3, 16):  # the third group of 3 ranks is on two nodes
        (text,) = warnings(Degrees(1, 1, 4, 1, tp))
        assert text.startswith(
            f"tensor parallel spans nodes: groups of {tp} ranks do not fit into nodes of 8"
        )


def test_many_shards_are_warned_about() -> None:
    assert warnings(Degrees(1, 16, 1024, 1, 1)) == []
    (text,) = warnings(Degrees(1, 1, 1024, 2, 1))
    assert text.startswith("FSDP shards over 2,048 ranks: ")


def test_padded_shards_are_warned_about() -> None:
    assert warnings(Degrees(1, 1, 64, 1, 1), size=109) == []
    (text,) = warnings(Degrees(1, 1, 64, 2, 1), size=178)
    assert "1.78 times an even share" in text
    assert "do not divide evenly by the 128 ranks" in text
    assert warnings(Degrees(1, 1, 1, 1, 8), size=178) == [], "nothing is sharded by rows"
    assert dry_run.warnings(simulated(64), Degrees(1, 1, 64, 1, 1), 8), "40 rows are sharded over 64 ranks"
    assert not dry_run.warnings(simulated(8), Degrees(1, 1, 8, 1, 1), 8)
