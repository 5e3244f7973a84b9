"""Peak memory of one rank, by kind, from counts of tensors: what is allocated at each point of a step.

A step is followed in the order of the program: forward of each block, loss, backward of each block and of
the embedding, optimizer step. All terms are counts of tensors, and no number is fitted. Which tensors the
compiler keeps and which buffers FSDP holds was found from the recorded runs that comments name.
benchmarks/plan_errors.py compares the peaks with all recorded runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from titanlite.lab.activations import Kept, kept_by_block
from titanlite.lab.cards import GIB
from titanlite.lab.planned import PlannedRun
from titanlite.lab.sharding import RankParameters, Unit, rank_parameters
from titanlite.parallel.pipeline_parallel import STAGES_PER_RANK

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "gathered", "workspace")
CUBLAS_WORKSPACE = 32 << 20  # torch's default on Hopper: docs of CUBLAS_WORKSPACE_CONFIG
# RESERVED: the largest ratio of torch's reserved to its allocated memory. Recorded runs have 1.00 to 1.23
# (llama3_8b_6layers_h200x2_tensor_float8.txt); one of gated delta nets, not counted, has 1.35.
# OUTSIDE: a guess of the memory outside torch, of CUDA's context and NCCL.
RESERVED, OUTSIDE = 1.23, 2 * GIB


@dataclass(frozen=True)
class Moment:
    """A point of a step, and the bytes allocated there by kind."""

    name: str
    sizes: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks at one place along the pipeline-parallel axis, over the last micro-batch of a
    step."""

    pp_rank: int
    parameters: RankParameters
    moments: list[Moment]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def rank_memory(run: PlannedRun) -> list[RankMemory]:
    """The memory of the ranks, one entry per place along the pipeline-parallel axis."""
    frees = run.step_memory.reshard(run.device_bytes).frees
    return [_Step(run, pp_rank, frees).memory() for pp_rank in range(run.degrees.pp)]


def at_most(memory: Sequence[RankMemory]) -> float:
    """The bytes of a GPU that the ranks need at most, with the most that torch has been seen to reserve."""
    return max(rank.peak.total for rank in memory) * RESERVED + OUTSIDE


def in_flight(schedule: str, pp_rank: int, ranks: int, num_micro_batches: int) -> float:
    """The largest number of micro-batches whose activations a rank holds at once, for all its blocks.

    1F1B: Narayanan et al. 2021. With two stages per rank, a micro-batch counts half for each stage. Before
    its first backward a rank runs 2 (ranks - rank - 1) + ranks forwards of the interleaved schedules."""
    if ranks == 1:
        return 1
    if schedule == "GPipe":
        return num_micro_batches
    if schedule == "1F1B":
        return min(ranks - pp_rank, num_micro_batches)
    if schedule == "ZBVZeroBubble":
        return min(ranks, num_micro_batches)
    return min((2 * (ranks - pp_rank - 1) + ranks + 1) / 2, num_micro_batches)


def _sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


class _Step:
    """Follows a step on the ranks with one coordinate along the pipeline-parallel axis."""

    def __init__(self, run: PlannedRun, pp_rank: int, frees: bool):
        self.run, self.pp_rank, self.frees = run, pp_rank, frees
        self.parameters = rank_parameters(run.parameters, run.job.parallelism, run.degrees, pp_rank)
        self.units, self.blocks = self.parameters.units, list(self.parameters.blocks.values())
        by_block = kept_by_block(run.shapes, run.job.activation_checkpoint)
        self.kept: list[Kept] = [by_block[i] for i in self.parameters.blocks]
        # Sums over the first blocks, from no block to all of them.
        self.kept_of_first = _sums(kept.kept for kept in self.kept)
        self.gathered_of_first = _sums(map(self._gathered, self.blocks))
        self.casts_of_first = _sums(k.casts * block.matrices for k, block in zip(self.kept, self.blocks))
        self.sharded_gradients_of_first = _sums(block.sharded_gradient for block in self.blocks)
        self.gradients_of_first = _sums(block.gradient for block in self.blocks)
        self.is_accumulating = run.num_micro_batches > 1
        self.reduces_each = run.job.parallel_settings(run.param_dtype).reduces_every_micro_batch

    def memory(self) -> RankMemory:
        return RankMemory(self.pp_rank, self.parameters, list(self._moments()))

    # ---- the points of a step

    def _moments(self) -> Iterator[Moment]:
        for i in range(len(self.blocks)):
            yield self._moment(f"forward of block {i}", self._forward(i))
        if self.parameters.has_loss:
            yield self._moment("loss", self._loss())
        for i in reversed(range(len(self.blocks))):
            yield self._moment(f"backward of block {i}", self._backward(i))
        if self.parameters.embedding or self.parameters.root:
            yield self._moment("backward of the embedding", self._embedding())
        # Muon's copies of a matrix and its buckets are left out: they are smaller than a block's activations.
        yield self._moment("optimizer step", {"gradients": self._gradients(len(self.blocks))})

    def _moment(self, name: str, sizes: dict[str, float]) -> Moment:
        run, units = self.run, self.units
        base = dict.fromkeys(KINDS, 0.0)
        base["workspace"] = CUBLAS_WORKSPACE
        if not run.job.training.enable_cpu_offload:
            average = sum(u.sharded_gradient for u in units) * run.job.ema.enable
            base["weights"] = 4.0 * (sum(u.sharded for u in units) + average)
            base["optimizer"] = sum(u.state_bytes for u in units)
        for kind, size in sizes.items():
            base[kind] += size
        if run.job.training.enable_cpu_offload:
            base["gradients"] = 0.0  # moved to the host as soon as they are reduced
        return Moment(name, base)

    def _forward(self, i: int) -> dict[str, float]:
        return {
            "activations": self._activations(i + 1),
            "gradients": self._accumulated(),
            "gathered": self._held_forward(i) + self._flat(self.blocks[i]) + self._casts(i + 1),
        }

    def _loss(self) -> dict[str, float]:
        run, last = self.run, len(self.blocks) - 1
        head = self.parameters.head
        gathered = self._held_forward(last) + self._casts(last + 1)
        if run.is_sharded and head is not None:
            gathered += self._gathered(head) + self._flat(head)
        elif run.is_sharded:
            gathered += self._flat(self.blocks[last])
        hidden = self._hidden()
        return {
            "activations": self._activations(last + 1) + hidden,
            "gradients": self._accumulated(),
            "logits": self._logits(),
            "gathered": gathered,
        }

    def _backward(self, i: int) -> dict[str, float]:
        run, kept = self.run, self.kept[i]
        workspace = 0.0
        if run.is_sharded:
            above = self.blocks[i + 1] if i + 1 < len(self.blocks) else self.parameters.head
            # FSDP holds the input of the reduction before this one until its own reduction begins.
            workspace = self._reduction(above) if above is not None else 0.0
        within = kept.repeated + run.shape.gradients(repeats=kept.repeats_mlp)
        return {
            "activations": self._activations(i + 1) + run.tokens * within,
            "gradients": self._gradients(len(self.blocks) - 1 - i),
            "gathered": self._held_backward(i) + self._casts(i + 1) + self._repeated_casts(i),
            "workspace": workspace,
        }

    def _embedding(self) -> dict[str, float]:
        """The gradient of the embedding's output in fp32, and the embedding's own."""
        run, unit = self.run, self.parameters.embedding or self.parameters.root
        assert unit is not None
        workspace = (
            self._reduction(unit) + run.param_dtype.itemsize * unit.gradient if run.is_sharded else 0.0
        )
        return {
            "activations": 6.0 * run.tokens * run.net.config.dim / run.degrees.tp,
            "gradients": self._gradients(len(self.blocks)),
            "gathered": self._gathered(unit) if run.is_sharded and not self.frees else 0.0,
            "workspace": workspace,
        }

    # ---- gradients

    def _accumulated(self) -> float:
        """Gradients of earlier micro-batches, during the forward of the last one."""
        units = self.units
        if not self.is_accumulating:
            return 0.0
        if self.run.is_sharded and not self.reduces_each:
            return 4.0 * sum(u.gradient for u in units)  # every rank has the gradients of all its parameters
        return 4.0 * sum(u.sharded_gradient for u in units)

    def _gradients(self, num_done: int) -> float:
        """Gradients after the backward of the head and of the last `num_done` blocks; with all blocks,
        also of the embedding."""
        units, left = self.parameters, len(self.blocks) - num_done
        if self.is_accumulating and (not self.run.is_sharded or self.reduces_each):
            return self._accumulated()
        sharded = self.sharded_gradients_of_first
        finished = sharded[-1] - sharded[left] + (units.head.sharded_gradient if units.head else 0)
        unsharded = self.gradients_of_first[left] if self.is_accumulating else 0.0
        for unit in (units.embedding, units.root):
            if unit is not None and not left:
                finished += unit.sharded_gradient
            elif unit is not None and (self.is_accumulating or unit is units.root):
                unsharded += unit.gradient  # of tied embeddings: from the loss on
        return 4.0 * (finished + unsharded)

    def _reduction(self, unit: Unit) -> float:
        """The input of FSDP's reduction of a unit, in the dtype of the reduction."""
        size = 4 if self.run.job.training.mixed_precision_reduce == "float32" else 2
        return float(size * unit.gradient)

    # ---- gathered weights, and copies of weights in the compute dtype

    def _gathered(self, unit: Unit) -> float:
        """Bytes of a unit that FSDP has gathered."""
        size = self.run.param_dtype.itemsize
        ends = (self.parameters.embedding, self.parameters.head, self.parameters.root)
        if self.run.job.float8.gathers_float8 and not any(unit is end for end in ends):
            return float(unit.matrices + size * (unit.gathered - unit.matrices))
        return float(size * unit.gathered)

    def _flat(self, unit: Unit) -> float:
        """The buffer of the newest all-gather, from which FSDP copies the parameters. It is held until the
        next all-gather."""
        return self._gathered(unit) if self.run.is_sharded else 0.0

    def _held_forward(self, i: int) -> float:
        """Bytes that FSDP holds in the forward of block i, with tied embeddings and an embedding that is not
        freed."""
        if not self.run.is_sharded:
            return 0.0
        root, embedding = self.parameters.root, self.parameters.embedding
        held = self._gathered(self.blocks[i]) if self.frees else self.gathered_of_first[i + 1]
        held += self._gathered(root) if root else 0.0
        return held + (self._gathered(embedding) if embedding and not self.frees else 0.0)

    def _held_backward(self, i: int) -> float:
        """Bytes that FSDP holds in the backward of block i: the next block is gathered ahead."""
        is_ahead = self.run.is_sharded and self.frees and i > 0
        return self._held_forward(i) + (2 * self._gathered(self.blocks[i - 1]) if is_ahead else 0.0)

    @property
    def _cast_size(self) -> int:
        """Bytes per element of the copies of weights that a single process makes; 0: it makes none. In float8
        none is kept: llama3_1b_float8_h200_b16_torchtitan.json."""
        run = self.run
        is_cast = not (run.is_sharded or run.param_dtype == torch.float32 or run.job.float8.enable)
        return run.param_dtype.itemsize * is_cast

    def _casts(self, num_blocks: int) -> float:
        """bf16 copies of the matrices of the first blocks, which autograd keeps for the backward."""
        return self._cast_size * self.casts_of_first[num_blocks]

    def _repeated_casts(self, i: int) -> float:
        """Copies that the repeated forward of block i makes again."""
        return self._cast_size * (1 - self.kept[i].casts) * self.blocks[i].matrices

    # ---- activations

    def _activations(self, num_blocks: int) -> float:
        """Bytes that the first blocks keep, and all blocks of the other micro-batches in flight."""
        run = self.run
        schedule = run.job.parallelism.pipeline_parallel_schedule
        others = in_flight(schedule, self.pp_rank, run.degrees.pp, run.num_micro_batches) - 1
        kept = self.kept_of_first
        sent = (
            self._num_pipeline_buffers()
            * run.num_micro_batches
            * run.net.config.dim
            * run.param_dtype.itemsize
        )
        return run.tokens * (kept[num_blocks] + others * kept[-1] + sent / run.degrees.tp)

    def _num_pipeline_buffers(self) -> int:
        """The number of buffers that torch's pipeline stages hold for each micro-batch of a step: one for the
        hidden states that a stage receives, one for their gradients (layouts_8b_h200x2_32768.json)."""
        if self.run.degrees.pp == 1:
            return 0
        num_stages = STAGES_PER_RANK[self.run.job.parallelism.pipeline_parallel_schedule]
        num_ends = (self.parameters.embedding is not None) + (self.parameters.head is not None)
        return 2 * num_stages - num_ends

    def _hidden(self) -> float:
        """The last hidden states. The final norm, which is not compiled, keeps its input in fp32. Its output,
        of which tensor parallel gathers all tokens, and with the chunked loss its gradient are in the compute
        dtype."""
        run, size = self.run, self.run.param_dtype.itemsize
        copies = 2 if self._is_chunked else 1
        return run.tokens * run.net.config.dim * (4 / run.degrees.tp + copies * size)

    @property
    def _is_chunked(self) -> bool:
        return self.run.job.loss.num_chunks(self.run.tokens) > 0 or self.run.degrees.tp > 1

    def _logits(self) -> float:
        """Logits, the head's gradient, and its weight in the compute dtype, which a single process casts.

        Chunked, or with tensor parallel: the logits of one chunk, which become their gradient, and the head's
        gradient in fp32. Otherwise the logits of all tokens, which compiled code overwrites with their
        gradient (memory_h200.json). Uncompiled, log-softmax is in fp32, and torch first casts its input
        (lora_memory_h200.json); a soft cap makes an fp32 copy, which needs no cast. Of all logits at once its
        output, its gradient and the gradient of its input are there together, before the head's gradient
        (blind_points_h200.json)."""
        run, size = self.run, self.run.param_dtype.itemsize
        vocabulary, d = run.net.vocab_size / run.degrees.tp, run.net.config.dim
        weight = vocabulary * d
        cast = 0.0 if run.is_sharded or size == 4 else size * weight
        if not self._is_chunked:
            if not run.job.compile.enable:
                return run.tokens * vocabulary * 12 + cast
            return run.tokens * vocabulary * size + cast + size * weight
        chunks = max(run.job.loss.num_chunks(run.tokens), 1)
        per_logit = size
        if not run.job.compile.enable and run.degrees.tp == 1:
            per_logit += 4 if size == 4 and not run.net.logit_softcap else 8
        chunk = -(-run.tokens // chunks)
        return chunk * (vocabulary * per_logit + d * size) + 4 * weight + cast
