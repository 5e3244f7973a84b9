"""The digest of the weights in the reports of some steps, by which runs are compared while they train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from titanlite.checkpoint.state import flattened, saved_tensors
from titanlite.checkpoint.state_digest import HashedShard, combine, hash_shard, tensor_digests
from titanlite.mesh import local_shard_and_offsets
from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.ranks import Ranks
from titanlite.runtime.runtime import Runtime

NAME = "train/weights_digest"


class WeightsDigest(OpenMetric):
    """The digest of the weights. The constructor is collective.

    Metrics:
        train/weights_digest: with `metrics.digest_freq`: digest of the weights after the step, 64 hexadecimal
            digits: a checkpoint of the step has the same ([same-bits.md](same-bits.md#digests))
    """

    def __init__(
        self,
        net: nn.Module,
        rt: Runtime,
        is_due: Callable[[int], bool],
        untimed: Callable[[str], AbstractContextManager[None]],
    ):
        """`net`: this rank's stages and shards. `is_due`: whether a step has a digest. `untimed`:
        Meter.untimed."""
        self._net, self._is_due, self._untimed = net, is_due, untimed
        self._is_first_replica = rt.mesh.coordinate.dp_replicate == 0
        self._ranks = Ranks(rt.ranks.folder)  # a save in the background uses the group of rt.ranks

    def measure(self, step: StepResult) -> dict[str, str]:
        """The digest, on rank 0, if one is due. Waits for the device. Collective."""
        if not self._is_due(step.step):
            return {}
        with self._untimed("time/digest_s"):
            of_ranks = self._ranks.gather(self._hashed() if self._is_first_replica else [])
            if of_ranks is None:
                return {}
            shards = [shard for hashed in of_ranks for shard in hashed]
            return {NAME: combine(tensor_digests(shards))["weights"]}

    def _hashed(self) -> list[HashedShard]:
        """This rank's shards, hashed on the host one after the other."""
        hashed = []
        for name, tensor in flattened({"model": saved_tensors(self._net)}).items():
            shard, offsets = local_shard_and_offsets(tensor)
            cells = hash_shard(name, shard.cpu(), tensor.shape, offsets)
            assert cells is not None, f"the layout cuts rows of {name}"
            hashed.append(cells)
        return hashed
