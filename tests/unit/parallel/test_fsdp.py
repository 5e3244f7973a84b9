"""Which gathered parameters FSDP frees after the forward."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.support.fsdp import reshards_after_forward
from titanlite.losses import CrossEntropy
from titanlite.mesh import build_mesh
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.parallel.apply import parallelize
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Parallelism
from titanlite.torch_compat import fake_process_group

SHAPE = {"n_layers": 3, "tie_word_embeddings": False}
DENSE, EXPERTS = Qwen3(flavor="debug", overrides=SHAPE), Qwen3MoE(flavor="debug", overrides=SHAPE)


def sharded(model: ModelFamily, num_ranks: int, **keys: Any) -> Decoder:
    """The model of rank 0 of `num_ranks` ranks, on the meta device."""
    parallelism = Parallelism(**keys)
    mesh = build_mesh(parallelism, "cpu", 0, num_ranks)
    settings = ParallelSettings(parallelism=parallelism)
    return parallelize(model.build_on_meta(), CrossEntropy(), mesh, settings).net


@pytest.mark.parametrize(
    ("model", "num_ranks", "keys", "frees"),
    [
        (DENSE, 2, {}, True),
        (DENSE, 2, {"tensor_parallel_degree": 2}, False),  # one shard
        (DENSE, 4, {"tensor_parallel_degree": 2}, True),
        (DENSE, 2, {"data_parallel_shard_degree": 1, "context_parallel_degree": 2}, True),
        (DENSE, 2, {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}, False),
        (DENSE, 4, {"pipeline_parallel_degree": 2}, False),
        # Tensor parallel does not shard experts, so FSDP shards them over its ranks.
        (EXPERTS, 2, {"tensor_parallel_degree": 2}, True),
        (EXPERTS, 2, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}, False),
        (EXPERTS, 4, {"tensor_parallel_degree": 4, "expert_parallel_degree": 2}, True),
        (EXPERTS, 2, {"expert_parallel_degree": 2}, True),  # the other parameters have two shards
    ],
    ids=str,
)
def test_the_default_frees_what_has_several_shards(
    model: ModelFamily, num_ranks: int, keys: dict[str, int], frees: bool
) -> None:
    with fake_process_group(0, num_ranks):
        net = sharded(model, num_ranks, **keys)
        modules = [*net.blocks().values(), *(layer.experts for layer in net.moe_layers().values())]
        reshards = [reshards_after_forward(m) for m in modules if isinstance(m, FSDPModule)]
    # All but the last block and its experts.
    num_blocks = len(net.blocks())
    num_freed = (num_blocks - 1) * len(reshards) // num_blocks
    assert reshards.count(True) == (num_freed if frees else 0)
