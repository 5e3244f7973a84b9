"""[parallelism]: how many ranks each kind of parallelism has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from titanlite.config.component import ConfigError, check_at_least


class Degrees(NamedTuple):
    """The number of ranks along each axis, or a rank's coordinate on each axis, in the mesh's order."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def of_experts(self, expert_degree: int) -> dict[str, int]:
        """The number of ranks along each axis of experts, in the mesh's order."""
        rest = self.dp_shard * self.cp * self.tp // expert_degree
        return {"pp": self.pp, REPLICAS: self.dp_replicate, EXPERT_FSDP: rest, EXPERT: expert_degree}

    def __str__(self) -> str:
        """The axes with more than one rank, such as `pp 2 x dp_shard 4`."""
        axes = [f"{axis} {size}" for axis, size in self._asdict().items() if size > 1]
        return " x ".join(axes) or "unsharded"


SHARD_KEY = "data_parallel_shard_degree"
KEYS = (  # one per field of Degrees, in the same order
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    SHARD_KEY,
    "context_parallel_degree",
    "tensor_parallel_degree",
)
ASYNC_KEY = "parallelism.enable_async_tensor_parallel"
EXPERT_KEY = "expert_parallel_degree"  # of ranks that are in the product of KEYS already
REPLICAS = "dp_replicate"
EXPERT_FSDP = "expert_fsdp"
EXPERT = "expert"


def check_data_parallel_only(
    key: str, degrees: Degrees, expert_degree: int, unsupported: Mapping[str, bool]
) -> None:
    """Raises ConfigError for a layout, or a setting in use, with which the setting `key` does not work: each
    data-parallel rank has to compute the whole model. `unsupported`: settings by key, and whether they are
    on."""
    for name, degree_key, degree in zip(degrees._fields, KEYS, degrees):
        if name in ("pp", "cp", "tp") and degree > 1:
            raise ConfigError(
                f"not with parallelism.{degree_key} = {degree}; only data-parallel ranks (FSDP, HSDP) can",
                key,
            )
    if expert_degree > 1:
        raise ConfigError(f"not with parallelism.expert_parallel_degree = {expert_degree}", key)
    if refused := [setting for setting, is_on in unsupported.items() if is_on]:
        raise ConfigError(f"not with {refused[0]}", key)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The layout of the ranks. The product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Copies of the model, each sharded over data_parallel_shard_degree ranks (HSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP). -1: all ranks that the
    other degrees leave."""
    context_parallel_degree: int = 1
    """Ranks over which each sequence's tokens are sharded. Attention gathers keys and values."""
    tensor_parallel_degree: int = 1
    """Ranks over which each layer's weights are sharded and, between layers, the tokens (sequence
    parallel)."""
    enable_async_tensor_parallel: bool = False
    """Send chunks of tensor parallel's matrix products while the next are computed. Needs compile.enable with
    inductor, and each tensor-parallel group on one machine. Losses differ in their last digits. No effect on
    a CPU."""
    pipeline_parallel_degree: int = 1
    """Groups of ranks over which the blocks are partitioned as pipeline stages. The pipeline's micro-batches
    are the accumulation steps."""
    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """With one stage per rank: `1F1B` alternates forwards and backwards, `GPipe` runs all forwards first.
    With two: `Interleaved1F1B` has smaller bubbles and more communication; `InterleavedZeroBubble` and
    `ZBVZeroBubble` fill the bubbles with gradients of weights, without compile.enable and activation
    checkpointing."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """Blocks fewer in the first stage, which has the embedding."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """Blocks fewer in the last stage, which has head and loss."""
    pipeline_parallel_split_points: list[str] = field(default_factory=list)
    """First block of each stage after the first, such as `["layers.3", "layers.6"]`. Empty: an even split."""
    expert_parallel_degree: int = 1
    """Ranks over which each layer's experts are partitioned, of the data_parallel_shard_degree x
    context_parallel_degree x tensor_parallel_degree ranks; FSDP shards over the rest. Must divide their
    number and the number of experts."""
    expert_parallel_comm_backend: Literal["default", "all_to_all", "gather"] = "default"
    """`all_to_all`: send a token's copies to the ranks of its experts. `gather`: gather all tokens on each
    rank. `default`: `gather` up to a degree of the experts per token, which sends fewer bytes there."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """`always`: free gathered parameters after the forward and gather them again for the backward, except the
    last block's and the head's. `never`: keep them. `default`: keep them with one shard, under pipeline
    parallel, or if the run is estimated to fit with them; the start log has the reason."""
    fsdp_reduce: Literal["step", "micro_batch"] = "step"
    """Sum gradients over ranks once per `step`: faster, but a rank keeps gradients of the whole model while
    micro-batches accumulate; or after each `micro_batch`: it keeps its shard."""

    def __post_init__(self) -> None:
        for key in (*KEYS, EXPERT_KEY):
            degree = getattr(self, key)
            if degree < 1 and (degree != -1 or key != SHARD_KEY):
                reason = "neither -1 nor at least 1" if key == SHARD_KEY else "below 1"
                raise ConfigError(f"{degree} is {reason}", key)
        check_at_least(
            self, 0, "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"
        )

    def check(self, seq_len: int, key: str) -> None:
        """Raises ConfigError, with `key`, unless context parallel and tensor parallel can shard sequences of
        `seq_len` tokens."""
        cp, tp = self.context_parallel_degree, self.tensor_parallel_degree
        if cp > 1 and seq_len % (2 * cp * tp):
            raise ConfigError(
                f"a sequence length of {seq_len} is no multiple of 2 x context_parallel_degree {cp} x "
                f"tensor_parallel_degree {tp}: each rank has two chunks of equal size of each sequence",
                key,
            )
        if seq_len % tp:
            raise ConfigError(
                f"a sequence length of {seq_len} is no multiple of tensor_parallel_degree {tp}: sequence "
                "parallel shards the tokens of each sequence over the tensor-parallel ranks",
                key,
            )

    def check_machine(self, device: torch.device, num_local_ranks: int) -> None:
        """Raises ConfigError if ranks that must be on one machine are not. `num_local_ranks`: number of ranks
        of this machine."""
        tp = self.tensor_parallel_degree
        if self.enable_async_tensor_parallel and device.type == "cuda" and num_local_ranks % tp:
            raise ConfigError(
                f"the ranks of tensor_parallel_degree {tp} must be on one machine; this one has "
                f"{num_local_ranks} ranks",
                ASYNC_KEY,
            )

    def check_compiler(self, backend: str | None) -> None:
        """Raises ConfigError if tensor parallel is to be asynchronous, but is not compiled by inductor.
        `backend`: the backend of torch.compile; None: no compilation."""
        if self.enable_async_tensor_parallel and self.tensor_parallel_degree > 1 and backend != "inductor":
            raise ConfigError(
                "torch's compiler makes tensor parallel asynchronous: set compile.enable, and leave "
                "compile.backend at inductor",
                ASYNC_KEY,
            )

    @property
    def has_expert_axes(self) -> bool:
        """Whether experts have separate axes: with expert parallel, and with tensor parallel, which does
        not shard experts, so that FSDP shards them over the tensor-parallel ranks, too."""
        return self.expert_parallel_degree > 1 or self.tensor_parallel_degree > 1

    def gathers_tokens(self, num_chosen: int) -> bool:
        """Whether expert parallel gathers all tokens, of which each has `num_chosen` experts. By default, if
        the ranks are not more than the copies of a token that an all-to-all would send."""
        degree, backend = self.expert_parallel_degree, self.expert_parallel_comm_backend
        return degree > 1 and (backend == "gather" or (backend == "default" and degree <= num_chosen))

    def describe(self, degrees: Degrees, num_experts: int) -> str:
        """The layout in words, such as `dp_shard 4`; with experts on separate axes
        `dp_shard 4, experts: expert_fsdp 2 x expert 2`."""
        if not num_experts or not self.has_expert_axes:
            return str(degrees)
        axes = degrees.of_experts(self.expert_parallel_degree)
        return f"{degrees}, experts: {EXPERT_FSDP} {axes[EXPERT_FSDP]} x {EXPERT} {axes[EXPERT]}"

    @property
    def fewest_ranks(self) -> int:
        """The smallest number of ranks that the degrees allow."""
        product = math.prod(max(getattr(self, key), 1) for key in KEYS)
        if self.data_parallel_shard_degree != -1:
            return product
        others = self.context_parallel_degree * self.tensor_parallel_degree
        return product * self.expert_parallel_degree // math.gcd(self.expert_parallel_degree, others)

    def degrees(self, world_size: int) -> Degrees:
        """The degrees on `world_size` ranks. Raises ConfigError unless their product is `world_size`."""
        degrees = Degrees(*(getattr(self, key) for key in KEYS))
        product = " x ".join(f"{key} {degree}" for key, degree in zip(KEYS, degrees) if degree > 1)
        if degrees.dp_shard == -1:
            others = -math.prod(degrees)  # the product of all other degrees, because dp_shard is -1
            if world_size % others:
                ranks = "1 rank is" if world_size == 1 else f"{world_size} ranks are"
                raise ConfigError(
                    f"{ranks} no multiple of {product}; start {others} processes, or a multiple of {others}: "
                    f"NGPU={others} ./run_train.sh",
                    "parallelism",
                )
            return degrees._replace(dp_shard=world_size // others)
        if math.prod(degrees) != world_size:
            raise ConfigError(
                f"{product or 'no degree above 1'} makes {math.prod(degrees)} ranks, there "
                f"{'is' if world_size == 1 else 'are'} {world_size}; {SHARD_KEY} = -1 uses all ranks",
                "parallelism",
            )
        return degrees
