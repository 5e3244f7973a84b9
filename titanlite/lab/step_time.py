"""The time of a step, from FLOPs, bytes and the speeds of the GPU, and what it is spent on.

A micro-batch has t tokens of sequences of length T on one rank. N parameters are multiplied with every
token; of experts, only the experts that the token chose. N_b: parameters of the blocks without their last
products, which are not repeated; r: share of the blocks whose forward is repeated; L blocks, H heads of
size E.

    matrix products   (6 N + 2 r N_b) t FLOPs
    attention         (6 + 2 r) L H E T t FLOPs: half of 12 L H E T t, because it is causal; in a layer
                      with a window W below T, (12 + 4 r) H E W (1 - W / 2T) t
    memory traffic    5 x (bytes of kept activations and logits)
    optimizer         16 bytes per parameter and twice its state, and Optimizer.step_flops
    communication     FSDP gathers weights in the compute dtype once or twice per micro-batch, and reduces
                      gradients in fp32: hidden behind the computation, but for the first and the last unit
                      and for what takes longer. Tensor parallel: 4 all-gathers and 4 reduce-scatters of
                      hidden states per block. Context parallel: keys and values. Expert parallel: tokens to
                      their experts and back, twice. These are not hidden.
    pipeline bubble   (ranks - 1) / (micro-batches x stages per rank) of the computation

The shares of the peaks were fitted to the recorded runs on one to four H200 and rounded. The errors are in
benchmarks/results/plan_errors.json. Other GPUs are taken to reach the same shares, unless the machine was
measured (calibration.py). Nothing was measured across nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titanlite.lab.activations import kept_by_block
from titanlite.lab.cards import Cluster
from titanlite.lab.memory import RankMemory
from titanlite.lab.planned import PlannedRun
from titanlite.parallel.pipeline_parallel import STAGES_PER_RANK, ZERO_BUBBLE

MATMUL_SHARE = 0.64  # of the peak FLOP/s, for matrix products of bf16
ATTENTION_SHARE = 0.5
FLOAT8_TIME = 0.7  # of the time of the blocks' matrix products in bf16
ACTIVATION_PASSES = 5  # times that the bytes of a kept tensor pass through memory
OPTIMIZER_SHARE = 0.6  # of the memory's rate: optimizer_steps_h200.json
LINK_SHARE = 0.7  # of the data sheet's rate, for collectives: judged, not measured
# Parameters from which on the shares hold: the smallest such run is qwen3_0_6b_h200.json. Models with 30 to
# 38 million need longer.
LEAST_MEASURED = 500_000_000


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on."""

    parts: dict[str, float]
    tokens: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bound_by(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


def step_time(run: PlannedRun, memory: list[RankMemory], cluster: Cluster) -> StepTime:
    """The time of a step of `run.global_batch` sequences."""
    degrees, card = run.degrees, cluster.card
    slowest = max(memory, key=lambda rank: len(rank.parameters.blocks))
    share = len(slowest.parameters.blocks) / len(run.net.blocks())  # of the model's blocks: about 1 / pp
    num = run.num_micro_batches
    compute = {part: seconds * num * share for part, seconds in _compute(run, cluster).items()}
    parts = dict(compute)
    sizes = [tensor for unit in slowest.parameters.units for tensor in unit.tensors if tensor.is_trained]
    traffic = sum(t.sharded * (16 + 2 * t.state_bytes) for t in sizes)
    optimizer = traffic / (OPTIMIZER_SHARE * card.memory_rate) + _update_products(run, slowest, cluster)
    parts["optimizer"] = optimizer * cluster.speeds.optimizer
    exposed = _communication(run, slowest, cluster, sum(compute.values()))
    parts |= {name: seconds for name, seconds in exposed.items() if seconds}
    if degrees.pp > 1 and run.job.parallelism.pipeline_parallel_schedule not in ZERO_BUBBLE:
        stages = STAGES_PER_RANK[run.job.parallelism.pipeline_parallel_schedule]
        parts["pipeline bubble"] = sum(compute.values()) * (degrees.pp - 1) / (num * stages)
    return StepTime(parts, run.global_batch * run.job.training.seq_len)


def guesses(run: PlannedRun, changed: Sequence[str] | None = None) -> list[str]:
    """Why the step time of a run is a guess: the shares of the peaks were fitted to other kinds of runs. The
    factors are taken from plan_errors.json. Empty: it is none. `changed`: if the blocks, the head and the
    optimizer were measured, the decisive keys of which the job measured had other values."""
    size, degrees = sum(p.numel() for p in run.net.parameters()), run.degrees
    schedule = run.job.parallelism.pipeline_parallel_schedule
    has_frozen = any(not p.is_trained for p in run.parameters)
    of_compute = {
        f"models below {LEAST_MEASURED / 1e6:.0f}M parameters took 1.1 to 1.5 times as long, and with 2,048 "
        "tokens per step over 20 times": size < LEAST_MEASURED,
        "without compile.enable, steps took at least 1.2 times as long": not run.job.compile.enable,
        "with [lora], steps took 1.6 times as long (uncompiled)": has_frozen,
        "no run in fp32 was measured": run.param_dtype == torch.float32,
        "with experts, steps took 1.1 to 1.4 times as long": run.shape.num_experts > 0,
        "with deterministic kernels, steps took 1.1 to 1.2 times as long": run.job.training.is_deterministic,
        "with linear attention, steps took 1.3 times as long": any(shape.is_linear for shape in run.shapes),
    }
    if changed is not None:
        of_compute = {f"it was calibrated with another {', '.join(changed)}": bool(changed)}
    reasons = of_compute | {
        "no run with data_parallel_replicate_degree above 1 was measured": degrees.dp_replicate > 1,
        f"no run with the pipeline schedule {schedule} was measured": degrees.pp > 1 and schedule != "1F1B",
        "no run with training.enable_cpu_offload was measured": run.job.training.enable_cpu_offload,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _compute(run: PlannedRun, cluster: Cluster) -> dict[str, float]:
    """Seconds of one micro-batch for the whole model on one rank's share of each layer."""
    net, config, tp = run.net, run.net.config, run.degrees.tp
    kept = kept_by_block(run.shapes, run.job.activation_checkpoint)
    repeated = sum(k.repeated for k in kept) / max(sum(k.repeated + k.kept for k in kept), 1)
    if run.job.activation_checkpoint.mode == "full":
        repeated = 1.0
    forward = net.flops_per_token(run.job.training.seq_len)
    attention = forward - net.flops_per_token(0)
    # Of experts, the parameters of those that a token chooses; without the head and the final norm.
    blocks = net.num_matmul_parameters() - (net.vocab_size + 1) * config.dim
    block_share = 6 * blocks / max(forward - attention, 1)
    last = config.dim * run.shape.h * config.n_layers / blocks  # whose result the backward does not need
    products = (forward - attention) * (1 + repeated * (1 - last) * block_share / 3)
    if run.job.float8.enable:
        products *= 1 - (1 - FLOAT8_TIME) * block_share
    head_products, speeds = (forward - attention) * (1 - block_share), cluster.speeds
    products = (products - head_products) * speeds.blocks + head_products * speeds.head
    seq_len = run.job.training.seq_len
    keys = [kind.num_keys(seq_len) for kind in run.job.model.attention_kinds]
    # Of the keys that are counted. Layers of linear attention have none: their rule is among the products.
    visible = sum(num * (1 - num / (2 * seq_len)) for num in keys) / max(sum(keys), 1)
    causal = attention * visible * (1 + repeated / 3) * speeds.blocks
    tokens, peak = run.tokens, cluster.card.flops * tp
    kept_bytes = sum(sum(shape.tensors().values()) for shape in run.shapes) * (1 + repeated / 3)
    logits = 2 * run.param_dtype.itemsize * net.vocab_size / tp
    traffic = kept_bytes * speeds.blocks + logits * speeds.head
    return {
        "matrix products": products * tokens / (MATMUL_SHARE * peak),
        "attention": causal * tokens / (ATTENTION_SHARE * peak),
        "memory traffic": ACTIVATION_PASSES * tokens * traffic / cluster.card.memory_rate,
    }


def _update_products(run: PlannedRun, rank: RankMemory, cluster: Cluster) -> float:
    """Seconds of the matrix products of the optimizer's updates of the blocks, which the ranks of one copy of
    the model share."""
    degrees = run.degrees
    mine = {tensor.name for unit in rank.parameters.blocks.values() for tensor in unit.tensors}
    flops = sum(
        run.job.optimizer.step_flops(run.net, name, group.rule)
        for group, names in run.job.optimizer.grouped(run.net).items()
        for name in mine.intersection(names)
    )
    ranks = degrees.dp_shard * degrees.cp * degrees.tp
    return flops / ranks / (MATMUL_SHARE * cluster.card.flops)


def _communication(run: PlannedRun, rank: RankMemory, cluster: Cluster, compute_s: float) -> dict[str, float]:
    """Seconds of communication that computation does not hide."""
    degrees, config, num = run.degrees, run.net.config, run.num_micro_batches
    size, units = run.param_dtype.itemsize, rank.parameters.units
    shards, ep = degrees.dp_shard * degrees.cp, run.job.parallelism.expert_parallel_degree
    rate = _rate(cluster, degrees.tp, shards)
    gathers = 2 if shards > 1 and degrees.pp == 1 else 1
    reduces = num if run.job.parallelism.fsdp_reduce == "micro_batch" else 1
    fsdp = 0.0
    for t in (t for unit in units for t in unit.tensors):
        moved = num * gathers * size + 4 * reduces * t.is_trained
        fsdp += moved * t.gathered * (t.num_shards - 1) / t.num_shards / rate
    if degrees.dp_replicate > 1:
        copies = 2 * (degrees.dp_replicate - 1) / degrees.dp_replicate
        between = _rate(cluster, degrees.tp * shards, degrees.dp_replicate)
        fsdp += 4 * reduces * sum(u.sharded_gradient for u in units) * copies / between
    first_and_last = fsdp / max(len(units), 1) / max(num, 1)  # nothing runs beside them
    exposed = max(fsdp - compute_s, first_and_last if fsdp else 0.0)
    hidden = run.tokens * config.dim * size
    blocks = len(rank.parameters.blocks)
    passes = 1.5 if run.job.activation_checkpoint.mode == "full" else 1.0
    sent = hidden * (degrees.tp - 1) / degrees.tp
    tensor = 8 * passes * blocks * num * sent / _rate(cluster, 1, degrees.tp)
    keys = 2 * config.n_kv_heads * config.head_dim * size * run.tokens / degrees.tp
    with_keys = sum(not run.shapes[i].is_linear for i in rank.parameters.blocks)  # states are small
    context = 2 * with_keys * num * keys * (degrees.cp - 1) / _rate(cluster, degrees.tp, degrees.cp)
    # Received per token in one direction: its copies from other ranks, or the tokens of the other ranks.
    rows = ep - 1 if run.shape.gathers_tokens else run.shape.num_chosen * (ep - 1) / ep
    expert = 4 * passes * blocks * num * rows * hidden / degrees.tp / _rate(cluster, 1, ep)
    return {
        "FSDP's communication": exposed,
        "tensor parallel": tensor,
        "context parallel": context,
        "expert parallel": expert,
    }


def _rate(cluster: Cluster, stride: int, ranks: int) -> float:
    """Bytes/s of a collective over so many ranks, of which neighbours are `stride` GPUs apart. Between nodes,
    a collective uses the network of all its GPUs of a node."""
    rate = cluster.card.link_rate / cluster.speeds.link
    if stride * ranks > cluster.gpus_per_node:
        rate = min(rate, cluster.network_rate * max(cluster.gpus_per_node // stride, 1))
    return LINK_SHARE * rate
