"""`titanlite tune CONFIG --measure`: measures the speed of this machine for `titanlite plan --measured`.

The job's model, or the largest cut of it that fits and is fast, and one with half as many blocks take real
steps on random tokens. Their difference is the time of the blocks; the rest is the time of embedding, head
and loss."""

from __future__ import annotations

import gc
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from titanlite import start
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.paths import check_output_file
from titanlite.data.batch import Batch
from titanlite.files import make_folder, write_atomically
from titanlite.job import Job, load_job
from titanlite.lab.calibration import Measurement, part_times, split_as_planned
from titanlite.lab.cards import GIB, PCIE, Card, Cluster, known_card
from titanlite.lab.coordinate_check import SmallRun, random_batches
from titanlite.lab.layouts import DOES_NOT_FIT, FITS, Layout, assess
from titanlite.lab.plan import decisive_keys
from titanlite.lab.planned import planned_run
from titanlite.lab.step_time import LINK_SHARE
from titanlite.lab.step_timer import seconds_of, time_steps
from titanlite.lab.trial_runs import beside_run
from titanlite.log import tell
from titanlite.metrics.memory import OutOfMemory, is_out_of_memory
from titanlite.parallelism import Parallelism
from titanlite.runtime.compile_cache import use_compile_cache
from titanlite.runtime.environment import is_under_torchrun, prepare_to_launch
from titanlite.runtime.launcher import start_ranks
from titanlite.runtime.process import device_name
from titanlite.runtime.runtime import Runtime, runtime
from titanlite.table import table
from titanlite.tools.verbs import launch_arguments
from titanlite.torch_compat import gather_shards, reduce_shards

SHORT_S = 0.25  # planned seconds of a micro-batch, above which models with fewer blocks are measured
LONG_S = 2.0  # planned seconds of a micro-batch, above which fewer sequences are measured
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}  # of the square matrices of the matrix product
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}


def main(options: Namespace, overrides: Sequence[str]) -> int:
    """Measure, print and write the file. Returns the exit code."""
    job = load_job(options.config, overrides, None, allow_imports=True)
    ranks, output = options.gpus_per_trial, options.output
    if output is None:
        output = beside_run(job, "_measured.json")
        make_folder(output.parent)
    check_output_file(output)
    if ranks > 1 and not is_under_torchrun():
        launcher = launch_arguments([f"--nproc-per-node={ranks}", options.config])[0]
        words = [options.config, "--measure", f"--gpus-per-trial={ranks}", f"--output={output}", *overrides]
        prepare_to_launch(ranks)
        return start_ranks(launcher, ["tune", *words])
    try:
        gpus, one_rank = _num_gpus(job, ranks), _on_one_rank(job)
        with runtime(one_rank.training, one_rank.parallelism, job.comm, job.folder) as rt:
            use_compile_cache(job.compile.cache_dir, job.compile.enable, rt.device, job.folder)
            measurement = _measure(one_rank, options.config, rt)
    except ConfigError as e:
        raise toml.read(options.config, overrides)[1].located(e) from None
    if rt.rank == 0:
        write_atomically(output, measurement.to_json())
        text = f"{_text(measurement)}\n\n{_steps(job, gpus, measurement)}"
        print(f"{text}\n\nwritten: {output}, for titanlite plan --measured={output}")
    return 0


def _num_gpus(job: Job, ranks: int) -> int:
    """The number of GPUs of the steps that are printed: of `ranks` or, if the layout needs others, the fewest
    that it allows. Raises ConfigError for a job that no number of ranks can train."""
    try:
        job.check(ranks)
    except ConfigError:
        ranks = job.parallelism.fewest_ranks
        job.check(ranks)
    return ranks


def _on_one_rank(job: Job) -> Job:
    """The job without its layout. Raises ConfigError for jobs that cannot be measured so."""
    if job.training.enable_cpu_offload:
        raise ConfigError("--measure does not measure offloading", "training.enable_cpu_offload")
    training = replace(job.training, global_batch_size=-1, batch_ramp=[])
    unsharded = Parallelism(fsdp_reshard_after_forward="always")  # nothing to decide by the plan
    return replace(job, training=training, parallelism=unsharded, stages=[])


def _measure(job: Job, config: str, rt: Runtime) -> Measurement:
    """Measure on all ranks at once. `job`: _on_one_rank. Collective."""
    if rt.device.type not in PRODUCT_SIZE:
        raise ConfigError(f"--measure supports CUDA and the CPU, not {rt.device.type}")
    matmul_flops, memory_rate = _device_speeds(rt)
    card = _card(rt.device, matmul_flops, memory_rate)
    keys, (cluster, n) = decisive_keys(job), _fitting(job, card)
    job = _short_steps(job, cluster, n)
    num_blocks, sequences = job.model.config.n_layers, job.training.local_batch_size
    if rt.rank == 0:
        shape = f"{sequences} x {job.training.seq_len:,} tokens"
        tell(f"measuring {device_name(rt.device)}: {n} and {2 * n} blocks, micro-batches of {shape}")
    planned = part_times(_planned(job, cluster, n), _planned(job, cluster, 2 * n), n, num_blocks)
    small, large = _timed(job, rt, n), _timed(job, rt, 2 * n)
    measured = split_as_planned(part_times(small, large, n, num_blocks), planned, large[0], 2 * n)
    if rt.world_size > 1:
        size = _block_size(job)
        seconds = seconds_of(block_collectives(rt, size), rt.synchronize)
        sent = (2 * rt.param_dtype.itemsize + 4) * size * (rt.world_size - 1) / rt.world_size
        planned = planned._replace(link=sent / (LINK_SHARE * card.link_rate))
        measured = measured._replace(link=_slowest(rt, seconds)[0])
    return Measurement(
        config=config,
        device=device_name(rt.device),
        num_ranks=rt.world_size,
        card=card,
        planned=planned,
        measured=measured,
        matmul_flops=matmul_flops,
        memory_rate=memory_rate,
        sequences=sequences,
        keys=keys,
        versions={"torch": torch.__version__, "cuda": str(torch.version.cuda)},
    )


def _device_speeds(rt: Runtime) -> tuple[float, float]:
    """FLOP/s of a large matrix product in the dtype of the computation, and bytes/s of a copy, on the slowest
    rank. Collective."""
    n, num_bytes = PRODUCT_SIZE[rt.device.type], COPY_BYTES[rt.device.type]
    a = torch.randn(n, n, device=rt.device).to(rt.param_dtype)
    flops = 2 * n**3 / seconds_of(partial(torch.mm, a, a), rt.synchronize)
    x = torch.zeros(num_bytes // 4, device=rt.device)
    rate = 2 * num_bytes / seconds_of(partial(torch.empty_like(x).copy_, x), rt.synchronize)
    flops, rate = (min(of_ranks) for of_ranks in zip(*rt.ranks.gather_floats([flops, rate])))
    return flops, rate


def _slowest(rt: Runtime, *seconds: float) -> list[float]:
    """The longest of each time on all ranks. Collective."""
    return [max(of_ranks) for of_ranks in zip(*rt.ranks.gather_floats(seconds))]


def _card(device: torch.device, matmul_flops: float, memory_rate: float) -> Card:
    """This machine's card: known, or with the speeds that were measured."""
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return Card("CPU", memory, memory_rate, PCIE, matmul_flops, is_cpu=True)
    name, memory = device_name(device), torch.cuda.get_device_properties(device).total_memory / GIB
    known = known_card(name) or Card(name, memory, memory_rate, PCIE, matmul_flops)
    return known._replace(memory_gib=memory)


def _cut(job: Job, num_blocks: int) -> Job:
    """The job with so many blocks."""
    return replace(job, model=replace(job.model, overrides=job.model.overrides | {"n_layers": num_blocks}))


def _assess(job: Job, cluster: Cluster, num_blocks: int) -> Layout:
    return assess(planned_run(_cut(job, num_blocks), cluster), cluster)


def _fitting(job: Job, card: Card) -> tuple[Cluster, int]:
    """The number of blocks of the smaller of two models, of which the larger one has twice as many: the whole
    model if it fits the device and is fast. Raises ConfigError if two blocks do not fit."""
    cluster, n = Cluster(card, 1, 1), max(job.model.config.n_layers // 2, 1)
    while n > 1:
        layout = _assess(job, cluster, 2 * n)
        if layout.verdict == FITS and layout.time.seconds <= SHORT_S:
            return cluster, n
        n //= 2
    layout = _assess(job, cluster, 2)
    if layout.verdict == DOES_NOT_FIT:
        raise ConfigError(
            f"two blocks need {layout.peak_gib:.0f} GiB on one rank, and {card.name} has "
            f"{card.memory_gib:.0f}: lower it, or measure fewer features with model.overrides",
            "training.local_batch_size",
        )
    return cluster, 1


def _short_steps(job: Job, cluster: Cluster, n: int) -> Job:
    """The job with micro-batches that take no longer than LONG_S, as planned; on slow devices."""
    seconds = _planned(job, cluster, 2 * n)[0]
    size = max(int(job.training.local_batch_size * min(LONG_S / seconds, 1)), 1)
    return replace(job, training=replace(job.training, local_batch_size=size))


def _planned(job: Job, cluster: Cluster, num_blocks: int) -> tuple[float, float]:
    """Planned seconds of a micro-batch and of the optimizer."""
    parts = dict(_assess(job, cluster, num_blocks).time.parts)
    optimizer = parts.pop("optimizer")
    return sum(parts.values()), optimizer


def _timed(job: Job, rt: Runtime, num_blocks: int) -> tuple[float, float]:
    """Measured seconds of a micro-batch and of the optimizer on the slowest rank. Collective."""
    cut, training = _cut(job, num_blocks), job.training
    attention, _ = start.check_device(cut, rt.device, rt.param_dtype, 1)
    net = cut.build_on_meta()
    job.optimizer.check(net)
    # A second micro-batch, because most jobs accumulate gradients.
    shape = training.local_batch_size, training.seq_len
    batches = random_batches(2, shape, net.vocab_size, training.seed)
    if job.data.mask_documents:
        batches = [_one_document(batch) for batch in batches]
    trial = SmallRun(job, batches, training.seed, rt.device)
    settings = replace(cut.parallel_settings(rt.param_dtype), attention=attention, clock=rt.clock)
    gc.collect()  # the model before may be in a cycle, and hold the device's memory
    try:
        times = time_steps(net, trial, settings)
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        text = f"out of memory while measuring; lower --training.local_batch_size\n{e}"
        raise OutOfMemory(text) from e
    micro_batch_s, optimizer_s = _slowest(rt, *times)
    return micro_batch_s, optimizer_s


def _one_document(batch: Batch) -> Batch:
    """The batch with one document per sequence, for the kernel that masks documents."""
    sequences, length = batch.inputs.shape
    positions = torch.arange(length).expand(sequences, -1).contiguous()
    return replace(batch, positions=positions, num_documents=sequences)


def _block_size(job: Job) -> int:
    """Parameters of the largest block."""
    blocks = job.build_on_meta().blocks().values()
    return max(sum(p.numel() for p in block.parameters()) for block in blocks)


def _text(measurement: Measurement) -> str:
    """Planned and measured times as a table."""
    planned, measured, factors = measurement.planned, measurement.measured, measurement.speeds
    names = ("one block, forward and backward", "embedding, head and loss", "optimizer and clipping",
             "two all-gathers, one reduction")  # fmt: skip
    rows = [["seconds", "planned", "measured", "factor"]]
    for name, p, m, factor in zip(names, planned, measured, factors):
        if m is not None:
            rows.append([name, f"{p:.4g}", f"{m:.4g}", f"{factor:.2f}"])
    speeds = (
        f"{measurement.device}, torch {measurement.versions['torch']}: a large matrix product runs at "
        f"{measurement.matmul_flops / 1e12:.3g} TFLOP/s, a copy at {measurement.memory_rate / 1e9:,.0f} GB/s"
    )
    return f"{speeds}\n{table(rows, num_texts=1)}"


def _steps(job: Job, gpus: int, measurement: Measurement) -> str:
    """The job's step time by part, before and after the calibration, or that it does not fit."""
    before, device = Cluster(measurement.card, gpus, gpus), f"{gpus} x {measurement.card.name}"
    after = before._replace(speeds=measurement.speeds)
    layouts = [assess(planned_run(job, cluster), cluster) for cluster in (before, after)]
    if layouts[0].verdict == DOES_NOT_FIT:
        return f"no step time on {device}, because the job does not fit"
    times = [layout.time for layout in layouts]
    rows = [[f"step on {device}", "planned s", "calibrated s", "share"]]
    for part, seconds in times[0].parts.items():
        calibrated = times[1].parts[part]
        rows.append([part, f"{seconds:.4g}", f"{calibrated:.4g}", f"{calibrated / times[1].seconds:.0%}"])
    rows.append(["together", *(f"{time.seconds:.4g}" for time in times), ""])
    return table(rows, num_texts=1)


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
