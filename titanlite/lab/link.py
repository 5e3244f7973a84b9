"""The collectives of FSDP on buffers of one block, for measuring the links between the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from titanlite.runtime.runtime import Runtime
from titanlite.torch_compat import gather_shards, reduce_shards


def block_collectives(rt: Runtime, num_elements: int) -> Callable[[], None]:
    """A function that gathers the weights of a block of `num_elements` twice, in the dtype of the
    computation, and reduces their gradients once, in fp32, over all ranks. Collective."""
    shard = -(-num_elements // rt.world_size)
    weights = torch.zeros(shard, dtype=rt.param_dtype, device=rt.device)
    gathered = weights.new_empty(shard * rt.world_size)
    gradients = torch.zeros(shard * rt.world_size, device=rt.device)
    reduced = gradients.new_empty(shard)

    def run() -> None:
        for _ in range(2):
            gather_shards(gathered, weights)
        reduce_shards(reduced, gradients)

    return run
