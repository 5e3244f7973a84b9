"""The rules of expert parallel, the axes and shards of experts, and the order of rows that arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from tests.support.fsdp import reshards_after_forward
from tests.support.models import family
from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.losses import CrossEntropy
from titanlite.mesh import Mesh, build_mesh, local_shard
from titanlite.models.base import ModelFamily
from titanlite.models.moe import places
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.parallel.apply import parallelize
from titanlite.parallel.expert_parallel import _order_by_expert, check_expert_parallel
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.parallelism import Degrees, Parallelism
from titanlite.torch_compat import fake_process_group

SHAPE = {
    "dim": 40, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 64,
    "vocab_size": 96, "n_experts": 8, "n_experts_per_token": 2, "moe_hidden_dim": 24,
}  # fmt: skip


def model(**overrides: Any) -> ModelFamily:
    return Qwen3MoE(flavor="debug", overrides={**SHAPE, **overrides})


def settings_of(degree: int, **options: Any) -> ParallelSettings:
    return ParallelSettings(parallelism=Parallelism(expert_parallel_degree=degree, **options))


def sharded(settings: ParallelSettings, rank: int, num_ranks: int, **overrides: Any) -> ShardedModel:
    mesh = build_mesh(settings.parallelism, "cpu", rank, num_ranks)
    return parallelize(model(**overrides).build_on_meta(), CrossEntropy(), mesh, settings)


@pytest.mark.parametrize(
    ("degree", "degrees", "overrides", "reason"),
    [
        (3, Degrees(1, 1, 8, 1, 1), {}, "3 does not divide the 8 ranks of dp_shard 8 x cp 1 x tp 1; "
         "possible: 1, 2, 4, 8"),
        (16, Degrees(1, 2, 8, 1, 1), {}, "16 does not divide the 8 ranks"),
        (4, Degrees(1, 1, 4, 1, 2), {"n_experts": 6}, "4 does not divide n_experts = 6 of qwen3_moe debug; "
         "possible: 1, 2"),
        (2, Degrees(1, 1, 12, 1, 1), {}, "neither their number nor dim = 40 is divisible by 6"),
        (1, Degrees(1, 1, 16, 1, 2), {"dim": 64, "moe_hidden_dim": 40}, "2 moe_hidden_dim = 80"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_partitioned_are_refused(
    degree: int, degrees: Degrees, overrides: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as e:
        check_expert_parallel(Parallelism(expert_parallel_degree=degree), degrees, model(**overrides))
    assert reason in str(e.value)
    assert e.value.key == "parallelism.expert_parallel_degree"


def test_experts_that_can_be_partitioned_are_accepted() -> None:
    for degree in (1, 2, 4, 8):
        check_expert_parallel(Parallelism(expert_parallel_degree=degree), Degrees(2, 2, 4, 1, 2), model())
    by_rows = Degrees(1, 1, 16, 1, 1)  # 4 experts per rank over 8 ranks: dim 40 and 48 rows can be sharded
    check_expert_parallel(Parallelism(expert_parallel_degree=2), by_rows, model())


def test_a_dense_family_is_refused() -> None:
    dense = family()
    check_expert_parallel(Parallelism(), Degrees(1, 1, 2, 1, 1), dense)
    with pytest.raises(ConfigError, match="has no experts: set it to 1"):
        check_expert_parallel(Parallelism(expert_parallel_degree=2), Degrees(1, 1, 2, 1, 1), dense)
    with pytest.raises(ConfigError, match="0 is below 1"):
        Parallelism(expert_parallel_degree=0)


LAYOUTS = [  # expert degree, ranks, other degrees, dims of the experts that FSDP shards
    full(2, 4, {}, 0),
    full(4, 4, {}, 0),
    (2, 8, {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, 0),
    full(1, 4, {"tensor_parallel_degree": 4}, 0),
    (4, 16, {"context_parallel_degree": 2}, 1),
]


@pytest.mark.parametrize(("degree", "num_ranks", "others", "dim"), LAYOUTS, ids=str)
def test_the_shards_of_all_ranks_are_the_experts(
    degree: int, num_ranks: int, others: dict[str, int], dim: int
) -> None:
    settings = settings_of(degree, **others)
    copies = others.get("data_parallel_replicate_degree", 1)
    total = 0
    for rank in range(num_ranks):
        with fake_process_group(rank, num_ranks):
            net = sharded(settings, rank, num_ranks, moe_hidden_dim=32).net
            layer = net.moe_layers()["model.layers.0.mlp"]
            assert layer.experts.down_proj.placements[-2].dim == dim
            assert layer.experts.down_proj.placements[-1] == Shard(0)
            total += sum(local_shard(p).numel() for p in layer.experts.parameters())
    assert total == 8 * 40 * 32 * 3 * copies


@pytest.mark.parametrize("choice", ["default", "always", "never"])
def test_experts_stay_gathered_as_long_as_their_block(choice: Any) -> None:
    """Zero-bubble schedules would otherwise compute gradients with freed weights, without an error."""
    with fake_process_group(0, 4):
        net = sharded(settings_of(2, fsdp_reshard_after_forward=choice), 0, 4).net
        reshards = []
        for name, layer in net.moe_layers().items():
            block = net.get_submodule(name.rpartition(".")[0])
            of_block, of_experts = (reshards_after_forward(module) for module in (block, layer.experts))
            assert of_block == of_experts
            reshards.append(of_block)
    assert reshards == ([False] * 3 if choice == "never" else [True, True, False])


def test_a_layout_without_axes_of_their_own() -> None:
    with fake_process_group(0, 2):
        net = sharded(settings_of(1), 0, 2).net
        assert not any(isinstance(layer.experts, FSDPModule) for layer in net.moe_layers().values())


def test_the_expert_axes_have_the_same_ranks_in_the_same_order() -> None:
    parallelism = Parallelism(
        pipeline_parallel_degree=2,
        context_parallel_degree=2,
        tensor_parallel_degree=2,
        expert_parallel_degree=4,
    )
    with fake_process_group(11, 16):
        mesh = build_mesh(parallelism, "cpu", 11, 16)
        before = mesh.groups
        assert mesh.experts.mesh.tolist() == torch.arange(16).view(2, 2, 4).tolist()
        assert dist.get_process_group_ranks(mesh.expert.get_group()) == [8, 9, 10, 11]
        assert dist.get_process_group_ranks(mesh.expert_fsdp.get_group()) == [11, 15]
        assert set(mesh.groups) - set(before) == set(mesh.experts.get_all_groups()) - set(before) != set()


def test_layouts_are_described_with_the_axes_of_experts() -> None:
    degrees = Degrees(1, 1, 4, 1, 2)
    assert Parallelism(expert_parallel_degree=4).describe(degrees, 0) == "dp_shard 4 x tp 2"
    text = Parallelism(expert_parallel_degree=4).describe(degrees, 8)
    assert text == "dp_shard 4 x tp 2, experts: expert_fsdp 2 x expert 4"
    assert Parallelism().describe(Degrees(1, 1, 4, 1, 1), 8) == "dp_shard 4"
    assert not Mesh(degrees, 0, None, 4).has_expert_axes, "a single process shards nothing"


def test_rows_are_sorted_by_expert_and_then_by_rank() -> None:
    counts = torch.tensor([[2, 0, 1], [0, 0, 0], [1, 3, 2]])  # 3 ranks, 3 experts
    rows = [
        (expert, rank) for rank in range(3) for expert in range(3) for _ in range(int(counts[rank, expert]))
    ]
    order = _order_by_expert(counts, len(rows))
    assert [rows[i] for i in order] == sorted(rows)
    place = places(order, len(rows) + 1)
    assert order[place[:-1]].tolist() == list(range(len(rows)))
    assert place[-1] == len(rows), "a pair without a row"
    assert len(_order_by_expert(torch.zeros(2, 3, dtype=torch.int64), 0)) == 0


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        ({"expert_parallel_degree": 4}, 4),
        ({"expert_parallel_degree": 4, "tensor_parallel_degree": 2}, 4),
        ({"expert_parallel_degree": 4, "tensor_parallel_degree": 8}, 8),
        ({"expert_parallel_degree": 2, "pipeline_parallel_degree": 2}, 4),
        ({"expert_parallel_degree": 2, "data_parallel_shard_degree": 1}, 1),  # refused by check
    ],
)
def test_the_fewest_ranks_hold_the_expert_axis(keys: dict[str, int], ranks: int) -> None:
    assert Parallelism(**keys).fewest_ranks == ranks
