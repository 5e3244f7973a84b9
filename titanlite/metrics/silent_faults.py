"""Silent faults: GPUs that compute wrong numbers without an error, found by comparing bits.

From time to time all ranks with equal weights compute the same micro-batch. With deterministic kernels their
results are equal, bit by bit, unless a GPU is faulty. The majority is right."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch
from titanlite.parallel.fingerprint import broadcast_batch, comparable_ranks, gather_digests
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.runtime.process import device_name
from titanlite.runtime.runtime import Runtime

MAX_NAMED = 4  # ranks in one message
REMEDY = (
    "test the GPU, for example by `dcgmi diag -r 3`, or leave its node out, and start the same command again"
)
Digests = Mapping[str, int]  # by name of the result


class Verdict(NamedTuple):
    """Which ranks have wrong results. `wrong`: for each of them, by its number in the group, the names of its
    results that differ. `is_certain`: False if these are more ranks than are faulty, such as both of two that
    differ."""

    wrong: dict[int, list[str]]
    is_certain: bool


def judge(computed: Sequence[Sequence[Digests]]) -> Verdict | None:
    """Find the ranks with wrong results; None if all results are equal. `computed[i]`: the digests of rank i
    of a group, one for each time that it computed the micro-batch.

    A rank is wrong if it differs from itself, or else from more than half of the ranks. Where neither tells,
    all ranks may be."""
    keys = [{tuple(digests.values()) for digests in own} for own in computed]
    if len(set.union(*keys)) == 1:
        return None
    ranks = range(len(computed))
    wrong = [rank for rank in ranks if len(keys[rank]) > 1]
    is_certain = len(wrong) <= max(len(ranks) // 2, 1)
    if not wrong:
        common, number = Counter(min(key) for key in keys).most_common(1)[0]
        is_certain = 2 * number > len(ranks)
        wrong = [rank for rank in ranks if not is_certain or keys[rank] != {common}]
    right = [digests for rank in ranks if rank not in wrong for digests in computed[rank]]
    others = right or [digests for own in computed for digests in own]
    return Verdict({rank: _differing([*computed[rank], *others]) for rank in wrong}, is_certain)


def _differing(results: Sequence[Digests]) -> list[str]:
    """The names whose digests are not all equal."""
    return [name for name in results[0] if len({digests[name] for digests in results}) > 1]


class WrongRank(NamedTuple):
    """A rank that has, or may have, wrong results."""

    rank: int
    device: str
    differing: list[str]
    num_results: int
    is_certain: bool

    def __str__(self) -> str:
        num, names = len(self.differing), ", ".join(self.differing[:2])
        names += f" and {num - 2} more" if num > 2 else ""
        return f"rank {self.rank} on {self.device}: {num} of {self.num_results} results differ ({names})"


@dataclass(frozen=True)
class Fault:
    """The result of a check in which ranks differed. `since`: the step of the check before, 0 if there was
    none."""

    step: int
    since: int
    ranks: list[WrongRank]

    @property
    def reason(self) -> str:
        """Whose results are wrong, and on which GPUs."""
        is_certain = all(rank.is_certain for rank in self.ranks)
        kind = "wrong results" if is_certain else "different results, of which some are wrong,"
        ranks = "; ".join(str(rank) for rank in self.ranks[:MAX_NAMED])
        if len(self.ranks) > MAX_NAMED:
            ranks += f"; and {len(self.ranks) - MAX_NAMED} more ranks"
        return f"{kind} of {ranks}"

    def __str__(self) -> str:
        return (
            f"silent fault: {self.reason}; found after step {self.step}, when all ranks computed the same "
            f"micro-batch; the weights since step {self.since}, the check before, may be wrong and are not "
            "saved"
        )

    def about(self) -> dict[str, Any]:
        """The values of the event."""
        ranks = ", ".join(str(rank.rank) for rank in self.ranks)
        return {"reason": self.reason, "ranks": ranks, "checked_before": self.since, "text": str(self)}


def check_same_devices(rt: Runtime) -> None:
    """Raises ConfigError if ranks have devices of different kinds, whose results have other last bits.
    Collective."""
    kinds = rt.ranks.union([device_name(rt.device)])
    if len(kinds) > 1:
        raise ConfigError(
            f"compares the bits of ranks, which differ on devices of different kinds: {', '.join(kinds)}",
            "guard.fault_check_freq",
        )


def find_wrong_ranks(
    model: ShardedModel, rt: Runtime, batch: Batch, num_targets: torch.Tensor, number: int
) -> list[WrongRank]:
    """Let the ranks compute the same micro-batch, and compare their results. Returns the ranks that have, or
    may have, wrong results.

    `batch`: a micro-batch of this rank. `number`: of the check; each check takes the micro-batch of another
    rank. If any results differ, all ranks compute it once more; a single rank always does. Waits for the
    device. Collective over all ranks."""
    group = comparable_ranks(rt.mesh)
    num_ranks = 1 if group is None else group.size()
    batch = broadcast_batch(batch, group, number % num_ranks)

    def compute() -> list[dict[str, int]]:
        return gather_digests(model.fingerprint(batch, num_targets), group)

    times = [compute()] if num_ranks > 1 else [compute(), compute()]
    verdict = judge(list(zip(*times)))
    if not rt.ranks.max(torch.tensor(float(verdict is not None), device=rt.device)).item():
        return []
    times.append(compute())
    verdict = judge(list(zip(*times)))
    own = None
    here = 0 if group is None else group.rank()
    if verdict is not None and here in verdict.wrong:
        device, num_results = describe_device(rt.device), len(times[0][here])
        own = WrongRank(rt.rank, device, verdict.wrong[here], num_results, verdict.is_certain)
    return [rank for rank in rt.ranks.all_gather(own) if rank is not None]


def describe_device(device: torch.device) -> str:
    """The host and the device, such as `node7, GPU 3 (NVIDIA H200, GPU-5d2ba4a8-...)`, with the UUID that
    nvidia-smi shows."""
    name = device_name(device)
    if device.type != "cuda":
        return f"{socket.gethostname()}, {device.type} ({name})"
    uuid = torch.cuda.get_device_properties(device).uuid
    return f"{socket.gethostname()}, GPU {device.index} ({name}, GPU-{uuid})"
