"""Whether FSDP frees gathered weights after the forward, by an estimate of the memory of a step.

Kept weights are not gathered again for the backward, which is faster, so `default` keeps them where they fit.
The estimate is above the peak that `titanlite plan` counts, by up to a factor of two. A test compares the
choices with all recorded runs on several GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from titanlite.log import logger
from titanlite.losses import Loss
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer
from titanlite.parallel.fsdp import frees_by_default
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Degrees, Parallelism
from titanlite.ranks import Ranks

GIB = 1 << 30
LITTLE = 0.05  # share of a GPU's memory that kept weights may take in any run
# Memory that torch reserves beside its tensors, as a factor, and a guess of the memory outside torch: CUDA's
# context, NCCL.
RESERVED, OUTSIDE = 1.1, 2 * GIB
UNCOMPILED = 1.35  # factor of activations without the compiler, which keeps norms in fp32


class Reshard(NamedTuple):
    """Whether FSDP frees gathered weights after the forward, and why."""

    frees: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The settings that decide the memory of a step on one rank. `net`: the whole model. `settings`: with the
    attention that the job names. `tokens`: of a micro-batch on the rank. `accumulates`: whether micro-batches
    accumulate gradients."""

    net: Decoder
    optimizer: Optimizer
    loss: Loss
    settings: ParallelSettings
    degrees: Degrees
    has_average: bool
    tokens: int
    accumulates: bool

    def reshard(self, device_bytes: int) -> Reshard:
        """Choose whether FSDP frees gathered weights. `device_bytes`: memory of a GPU; 0: a CPU."""
        settings, has_experts = self.settings, bool(self.net.moe_layers())
        choice = settings.parallelism.fsdp_reshard_after_forward
        if choice != "default":
            return Reshard(choice == "always", f'fsdp_reshard_after_forward is "{choice}"')
        if not frees_by_default(settings.parallelism, self.degrees, has_experts, settings.cpu_offload):
            once = "pipeline parallel would gather them again for each micro-batch"
            return Reshard(False, once if self.degrees.pp > 1 else "each has one shard")
        if settings.cpu_offload:
            return Reshard(True, "training.enable_cpu_offload is set")
        if not device_bytes:
            return Reshard(True, "the memory of a CPU is not estimated")
        if reason := self._unknown(has_experts):
            # Running out of memory costs more than gathering.
            if self._gathered() <= LITTLE * device_bytes:
                return Reshard(False, f"they take at most {LITTLE:.0%} of the GPU's memory")
            return Reshard(True, f"whether they fit the GPU is not known ({reason})")
        need = self.num_bytes()
        sizes = f"up to {need / GIB:.1f} of the GPU's {device_bytes / GIB:.1f} GiB"
        return Reshard(need > device_bytes, f"with them, the run is estimated to need {sizes}")

    def resolved(self, mesh: Mesh, ranks: Ranks) -> Parallelism:
        """The section [parallelism] with "always" or "never" for a fsdp_reshard_after_forward of "default",
        and a line in the log. Unchanged on a CPU and without FSDP. Collective: all ranks decide by the memory
        of the smallest GPU."""
        parallelism = self.settings.parallelism
        is_sharded_on_gpus = ranks.device.type == "cuda" and mesh.device_mesh is not None
        if parallelism.fsdp_reshard_after_forward != "default" or not is_sharded_on_gpus:
            return parallelism
        own = torch.cuda.get_device_properties(ranks.device).total_memory
        frees, reason = self.reshard(ranks.all_reduce(own, min))
        action = (
            "frees gathered weights after the forward" if frees else "keeps gathered weights for the backward"
        )
        logger.info(f"FSDP {action}: {reason}")
        return replace(parallelism, fsdp_reshard_after_forward="always" if frees else "never")

    def num_bytes(self) -> float:
        """The bytes of a GPU that the step needs if gathered weights are kept."""
        return RESERVED * (self._state() + self._gathered() + self._logits()) + self._activations() + OUTSIDE

    def _unknown(self, has_experts: bool) -> str:
        """Why the estimate does not hold; empty: it does."""
        if has_experts and self.settings.parallelism.has_expert_axes:
            return "experts are sharded over axes of experts"
        if None in self._state_bytes.values():
            return f"the optimizer {self.optimizer.name!r} does not tell its state_bytes"
        if any(kind.is_linear for kind in getattr(self.net.config, "attention_kinds", ())):
            return "the activations of linear attention are not estimated"
        attention = self.settings.attention
        if not attention.linear_memory or getattr(attention, "sdpa_kernel", "auto") == "math":
            return "the attention may keep all scores or a mask of all pairs of tokens"
        return ""

    @cached_property
    def _state_bytes(self) -> dict[str, float | None]:
        """Bytes of optimizer state per element, by the names of the trained parameters."""
        optimizer, net = self.optimizer, self.net
        rules = {name: group.rule for group, names in optimizer.grouped(net).items() for name in names}
        return {name: optimizer.state_bytes(net.get_parameter(name), rule) for name, rule in rules.items()}

    def _state(self) -> float:
        """Weights, their average, gradients and optimizer state between steps, sharded."""
        num_bytes = 4.0 * (1 + self.has_average) * sum(p.numel() for p in self.net.parameters())
        for name, state in self._state_bytes.items():
            num_bytes += (4 + (state or 0)) * self.net.get_parameter(name).numel()
        return num_bytes / (self.degrees.dp_shard * self.degrees.cp * self.degrees.tp)

    def _gathered(self) -> float:
        """Gathered weights and, while micro-batches accumulate, gradients that are not reduced yet."""
        num_bytes = float(self.settings.param_dtype.itemsize * sum(p.numel() for p in self.net.parameters()))
        if self.accumulates and self.settings.parallelism.fsdp_reduce == "step":
            num_bytes += 4 * sum(self.net.get_parameter(name).numel() for name in self._state_bytes)
        return num_bytes / self.degrees.tp

    def _activations(self) -> float:
        """The input and the output of each matrix of the blocks, for each token: a little more than a block
        keeps, because its first layers share an input."""
        blocks, tp, dim = list(self.net.blocks().values()), self.degrees.tp, self.net.config.dim
        chosen = getattr(self.net.config, "n_experts_per_token", 1)
        matrices = [[p for p in block.parameters() if p.ndim > 1] for block in blocks]
        features = max(sum(sum(p.shape[-2:]) * (chosen if p.ndim > 2 else 1) for p in ps) for ps in matrices)
        # With tensor parallel, every rank has the outputs of the norms for all tokens.
        whole = features / tp * (1 if self.settings.compile.enable else UNCOMPILED) + 2 * dim * (tp > 1)
        share, config = self.settings.activation_checkpoint.kept_share, self.net.config
        # Context parallel keeps the keys and values of whole sequences in every mode.
        keys = 2 * config.n_kv_heads * config.head_dim * self.degrees.cp / tp if self.degrees.cp > 1 else 0
        kept = len(blocks) * (max(share * whole, dim) + keys) + (1.5 - share) * whole
        return self.tokens * self.settings.param_dtype.itemsize * kept

    def _logits(self) -> float:
        """Logits of one chunk, without the compiler in fp32 and with two gradients; the head's gradient."""
        vocabulary = self.net.vocab_size / self.degrees.tp
        size = self.settings.param_dtype.itemsize if self.settings.compile.enable else 12
        num_tokens = self.tokens / max(self.loss.num_chunks(self.tokens), 1)
        return vocabulary * (num_tokens * size + 4 * self.net.config.dim)
