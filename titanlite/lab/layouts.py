"""The layouts of a number of GPUs that a job could use, and how each would do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlite.lab.cards import GIB, Cluster
from titanlite.lab.memory import OUTSIDE, RankMemory, at_most, rank_memory
from titanlite.lab.planned import PlannedRun
from titanlite.lab.step_time import StepTime, step_time
from titanlite.parallelism import EXPERT_KEY, Degrees
from titanlite.parallelism import KEYS as DEGREE_KEYS

FITS, CLOSE, DOES_NOT_FIT = "fits", "close", "does not fit"
MAX_DEGREE = 8  # of tensor and context parallel; pipeline parallel up to twice as many stages
MAX_MICRO_BATCH = 16  # sequences


@dataclass(frozen=True)
class Layout:
    """A layout and what it needs. `memory`: of the pipeline rank that needs most."""

    run: PlannedRun
    memory: RankMemory
    time: StepTime
    verdict: str

    @property
    def peak_gib(self) -> float:
        return self.memory.peak.total / GIB

    def overrides(self, given: PlannedRun) -> list[str]:
        """The command-line overrides that change the `given` run into this layout."""
        parallelism, training, checkpoint = "parallelism", "training", "activation_checkpoint"
        old, new = dict[str, Any](), dict[str, Any]()
        for values, run in ((old, given), (new, self.run)):
            values |= {f"{parallelism}.{key}": degree for key, degree in zip(DEGREE_KEYS, run.degrees)}
            for section, key in (
                (parallelism, EXPERT_KEY), (parallelism, "fsdp_reduce"), (training, "global_batch_size"),
                (training, "local_batch_size"), (checkpoint, "mode"),
            ):  # fmt: skip
                values[f"{section}.{key}"] = getattr(getattr(run.job, section), key)
        return [f"--{key}={value}" for key, value in new.items() if old[key] != value]


@dataclass(frozen=True)
class Refused:
    """A layout that cannot be used, and why. `peak_gib`: 0 unless it does not fit."""

    layout: str
    reason: str
    peak_gib: float = 0.0


def verdict(memory: Sequence[RankMemory], card_gib: float) -> str:
    """Whether the ranks' memory fits a GPU: with the most that torch has been seen to reserve, or only
    without (close)."""
    peak = max(rank.peak.total for rank in memory)
    if at_most(memory) <= card_gib * GIB:
        return FITS
    return CLOSE if peak + OUTSIDE <= card_gib * GIB else DOES_NOT_FIT


def assess(run: PlannedRun, cluster: Cluster) -> Layout:
    """A run on a cluster: memory, time, and whether it fits."""
    memory = rank_memory(run)
    largest = max(memory, key=lambda rank: rank.peak.total)
    return Layout(run, largest, step_time(run, memory, cluster), verdict(memory, cluster.card.memory_gib))


def fitting_layouts(
    given: PlannedRun, cluster: Cluster, refusal: Callable[[PlannedRun], str | None]
) -> tuple[list[Layout], list[Refused]]:
    """The layouts that fit, from the fastest to the slowest, each with the largest micro-batch that fits and
    the mode of activation checkpointing that is fastest; and the layouts that cannot be used.

    `refusal`: why a job cannot use a run's layout, or None. Layouts keep the global batch."""
    best, refused = list[Layout](), list[Refused]()
    for degrees, expert_degree in _degrees(given, cluster):
        placed = _placed(given, degrees, expert_degree)
        of_modes = [_largest(placed, mode, cluster, refusal) for mode in ("none", "selective", "full")]
        fitting = [layout for layout in of_modes if isinstance(layout, Layout)]
        if fitting:
            best.append(min(fitting, key=lambda layout: layout.time.seconds))
        elif isinstance(of_modes[-1], Refused):
            refused.append(of_modes[-1])
    best.sort(key=lambda layout: layout.time.seconds)
    return best, refused


def _largest(
    placed: PlannedRun, mode: str, cluster: Cluster, refusal: Callable[[PlannedRun], str | None]
) -> Layout | Refused:
    """The layout with the largest micro-batch that fits; if none does, why."""
    fastest, refused, given = None, None, placed.job
    checkpoint = replace(given.activation_checkpoint, mode=mode)  # type: ignore[arg-type]
    for size in itertools.takewhile(lambda n: n <= MAX_MICRO_BATCH, (2**i for i in itertools.count())):
        training = replace(given.training, local_batch_size=size, global_batch_size=placed.global_batch)
        run = replace(placed, job=replace(given, activation_checkpoint=checkpoint, training=training))
        if why := refusal(run):
            refused = refused or Refused(run.layout, why)
            continue
        layout = assess(run, cluster)
        if layout.verdict != FITS:
            why = f"too large even with mode = {mode!r} and micro-batches of {size}"
            refused = refused or Refused(run.layout, why, layout.peak_gib)
            break
        if fastest is None or layout.time.seconds <= fastest.time.seconds:
            fastest = layout
    if fastest is not None:
        return fastest
    assert refused is not None
    return refused


def _placed(given: PlannedRun, degrees: Degrees, expert_degree: int) -> PlannedRun:
    """The run on another layout."""
    parallelism = replace(
        given.job.parallelism,
        pipeline_parallel_degree=degrees.pp,
        data_parallel_replicate_degree=degrees.dp_replicate,
        data_parallel_shard_degree=degrees.dp_shard,
        context_parallel_degree=degrees.cp,
        tensor_parallel_degree=degrees.tp,
        expert_parallel_degree=expert_degree,
        fsdp_reduce="step" if degrees.pp > 1 else given.job.parallelism.fsdp_reduce,
    )
    return replace(given, degrees=degrees, job=replace(given.job, parallelism=parallelism))


def _degrees(given: PlannedRun, cluster: Cluster) -> Iterator[tuple[Degrees, int]]:
    """Degrees whose product is the number of GPUs: tensor parallel within a node, FSDP over all other ranks
    or, with copies of the model (HSDP), within a node. And with experts, each degree of expert parallel
    within a node."""
    num_experts = given.shape.num_experts
    for degrees in _dense_degrees(given, cluster):
        most = min(MAX_DEGREE, cluster.gpus_per_node, degrees.dp_shard * degrees.cp * degrees.tp)
        expert_degree = 1
        while expert_degree == 1 or (num_experts and expert_degree <= most):
            yield degrees, expert_degree
            expert_degree *= 2


def _dense_degrees(given: PlannedRun, cluster: Cluster) -> Iterator[Degrees]:
    powers = [2**i for i in range(MAX_DEGREE.bit_length())]
    for tp, cp, pp in itertools.product(powers, powers, [*powers, 2 * MAX_DEGREE]):
        ranks, left = divmod(cluster.gpus, tp * cp * pp)
        if left or ranks == 0 or tp > cluster.gpus_per_node:
            continue
        yield Degrees(pp, 1, ranks, cp, tp)
        within = cluster.gpus_per_node // (tp * cp)
        if 1 < within < ranks and ranks % within == 0:
            yield Degrees(pp, ranks // within, within, cp, tp)
