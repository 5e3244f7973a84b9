"""Out of memory, explained: in which step and phase, what the memory held, and which settings would help."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from titanlite.metrics.device import GIB

PHASES = {  # function in a traceback, from the outside in: what it is part of
    "forward_backward": "forward",
    "backward": "backward",
    "forward_one_chunk": "forward",  # of a pipeline, within its own step
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "grad_norm": "the gradient norm",
    "step": "the optimizer's step",
    "validate": "validation",
    "generate": "sampling",
    "save": "saving",
}


class Usage(NamedTuple):
    """Bytes of this rank at the peak, by kind. Activations are what is not one of the others."""

    parameters: int
    gradients: int
    optimizer: int
    logits: int
    activations: int


class Remedy(NamedTuple):
    """A setting, and about how many bytes less it takes."""

    setting: str
    saves: float


class OutOfMemory(RuntimeError):
    """The device's memory is used up; the message says by what."""


@dataclass(frozen=True)
class MemorySettings:
    """What the remedies depend on. `shards`: ranks over which gradients are reduced; `logits`: bytes that the
    loss holds at once."""

    local_batch_size: int
    micro_batches: int
    shards: int
    recompute: str
    chunked_loss: bool
    float8_possible: bool
    reduces_each: bool
    pipeline: bool
    logits: int

    @property
    def gathers_gradients(self) -> bool:
        """Whether a rank holds the whole model's gradients while micro-batches accumulate."""
        return not self.reduces_each and self.micro_batches > 1 and self.shards > 1


@contextmanager
def building(num_parameters: int, shards: int) -> Iterator[None]:
    """Explains it if the body, which gives the model its memory, runs out of it."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        weights = 4 * num_parameters / shards / GIB
        total = torch.cuda.mem_get_info()[1] / GIB if torch.cuda.is_available() else 0.0
        raise OutOfMemory(
            f"out of memory before the first step: of {total:.1f} GiB, weights take {weights:.1f}, gradients "
            f"{weights:.1f}, the optimizer {2 * weights:.1f} GiB (with one copy sharded over {shards} GPUs), "
            "and activations come on top. What would help: more GPUs for "
            "parallelism.data_parallel_shard_degree = -1, parallelism.data_parallel_replicate_degree = 1, "
            "smaller model.overrides, or training.enable_cpu_offload = true, which is slow"
        ) from e


def explain(
    trace: TracebackType | None,
    step: int,
    peak: int,
    optimizer: torch.optim.Optimizer,
    settings: MemorySettings,
) -> str:
    """The message for a run that ran out of memory in `step`, with `peak` bytes allocated."""
    used = usage(optimizer, settings, peak)
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in used._asdict().items())
    advice = "".join(
        f"\n  {remedy.setting} (about {remedy.saves / GIB:.1f} GiB less)"
        for remedy in remedies(used, settings)
    )
    return (
        f"out of memory in step {step}, {phase(trace)}: {peak / GIB:.1f} GiB at the peak ({kinds} GiB). "
        f"What would help most, by rules of thumb:{advice}"
    )


def phase(trace: TracebackType | None) -> str:
    """What was going on, by the innermost function of a traceback that says so."""
    names = [frame.name for frame in traceback.extract_tb(trace)]
    return next((PHASES[name] for name in reversed(names) if name in PHASES), "outside a step")


def usage(optimizer: torch.optim.Optimizer, settings: MemorySettings, peak: int) -> Usage:
    """What `peak` bytes are made of. The optimizer's parameters: a model's may be gathered copies."""
    logits = settings.logits
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = optimizer.state.values()
    weights = _bytes(parameters)
    gradients = max(
        _bytes(p.grad for p in parameters if p.grad is not None), weights
    )  # in step 1, not all yet
    if settings.gathers_gradients:
        gradients *= settings.shards
    moments = _bytes(t for state in states for t in state.values() if isinstance(t, torch.Tensor))
    fixed = weights + gradients + moments
    return Usage(weights, gradients, moments, logits, max(peak - fixed - logits, 0))


def remedies(used: Usage, settings: MemorySettings) -> list[Remedy]:
    """The three settings that help most, the best first; the figures are rules of thumb."""
    s, found = settings, []
    if s.recompute != "full":
        milder = ', or "selective" for half of it' if s.recompute == "none" else ""
        found.append(Remedy(f'activation_checkpoint.mode = "full"{milder}', 0.75 * used.activations))
    if s.local_batch_size > 1:
        half = max(n for n in range(1, s.local_batch_size) if s.local_batch_size % n == 0)
        found.append(
            Remedy(
                f"training.local_batch_size = {half}, with training.global_batch_size kept",
                (used.activations + (0 if s.chunked_loss else used.logits)) * (1 - half / s.local_batch_size),
            )
        )
    if not s.chunked_loss:
        found.append(Remedy('loss.name = "chunked_cross_entropy"', 0.9 * used.logits))
    if s.float8_possible:
        found.append(Remedy("float8.enable = true", 0.25 * used.activations))
    if s.gathers_gradients and not s.pipeline:
        saves = used.gradients * (1 - 1 / s.shards)
        found.append(Remedy('parallelism.fsdp_reduce = "micro_batch"', saves))
    found.append(Remedy("half of training.seq_len", used.activations / 2))
    if s.chunked_loss:
        found.append(Remedy("half of loss.chunk_tokens", used.logits / 2))
    fixed = used.parameters + used.gradients + used.optimizer
    found.append(Remedy("twice the GPUs, for parallelism.data_parallel_shard_degree = -1", fixed / 2))
    return sorted(found, key=lambda remedy: -remedy.saves)[:3]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    shards = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)  # a DTensor's is this rank's
    return sum(t.nbytes for t in shards if t.is_cuda or not torch.cuda.is_available())  # not offloaded ones
