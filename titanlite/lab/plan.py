"""Say what a run will need and cost, from arithmetic: without a GPU, in seconds.

For the layout of CONFIG: parameters, tokens and FLOPs; the memory of a rank by kind at the peak of a step,
and whether it fits the GPU; if it does, the time of a step and what it is spent on, hours, GPU hours and
money; the size of a checkpoint; the distance from compute-optimal. With --top, also the fastest layouts of
the same GPUs that fit, as overrides, and why others cannot be used. With --fit, a scaling law of finished
runs and its forecast of CONFIG's loss; without CONFIG, the law alone. docs/planning.md
has the formulas and their errors against measured runs."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from titanlite import start
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.data.dataset import RunSequences, SequenceDataset
from titanlite.data.remote_shards import RemoteTokens
from titanlite.job import Job, load_job
from titanlite.lab import fit, goodput
from titanlite.lab.calibration import Measurement, planned_gpus, read_measurement
from titanlite.lab.cards import CARDS, GIB, Cluster
from titanlite.lab.layouts import DOES_NOT_FIT, Layout, assess, fitting_layouts
from titanlite.lab.lost_time import Size
from titanlite.lab.memory import KINDS, at_most
from titanlite.lab.planned import PlannedRun, planned_run
from titanlite.lab.scaling_law import CHINCHILLA
from titanlite.lab.step_time import guesses
from titanlite.lab.verbs import plan_arguments
from titanlite.models.base import Decoder
from titanlite.parallel.dry_run import too_many_shards
from titanlite.report.charts import short
from titanlite.report.recorded_run import read_run
from titanlite.runtime.training import BatchLayout
from titanlite.table import table

DEFAULT_CARD = next(card for card in CARDS if card.name == "H100")
GPUS_PER_NODE = 8
# The law's runs had 70M to 16B parameters and 5B to 500B tokens (Hoffmann et al. 2022, section 3).
LEAST_PARAMETERS, LEAST_TOKENS = 70_000_000, 5_000_000_000
NEAR_OPTIMUM = 0.01  # nats, below which the distance says nothing: the law's constants are fitted to losses
RULE = 20  # tokens per parameter, Chinchilla's rule of thumb


def main(argv: Sequence[str]) -> int:
    """Print the plan of a job."""
    options, overrides = plan_arguments(argv)
    if options.config is None:
        return fit.main(options)
    if options.tokens is not None:
        overrides = [*overrides, f"--training.steps={options.tokens} tokens"]
    job = load_job(options.config, overrides, None, options.allow_imports)
    try:
        plan = _plan(job, options)
    except ConfigError as e:
        if options.tokens is not None and e.key == "training.steps":
            raise ConfigError(f"command line, --tokens: {e}") from None
        raise toml.read(options.config, overrides)[1].located(e) from None
    print(json.dumps(plan, indent=1) if options.json else _text(plan))
    return 0


def decisive_keys(job: Job) -> dict[str, Any]:
    """The keys of a job on which the times of its blocks, head and optimizer depend."""
    tree = toml.as_tree(job)
    whole = ("model", "attention", "compile", "float8", "activation_checkpoint", "loss", "lora", "ema")
    some = {"training": ("seq_len", "local_batch_size", "mixed_precision_param"), "optimizer": ("name",)}
    keys = {name: tree[name] for name in whole if name in tree}
    for section, names in some.items():
        keys[section] = {name: tree[section][name] for name in names if name in tree[section]}
    return dict(json.loads(json.dumps(keys, default=str)))


def _plan(job: Job, options: Namespace) -> dict[str, Any]:
    measurement = read_measurement(options.measured) if options.measured else None
    measured_run = read_run(folder, folder.name) if (folder := options.measured_run) else None
    fewest = job.parallelism.fewest_ranks
    if measured_run is not None and type(ranks := measured_run.env.get("world_size")) is int:
        fewest = max(ranks, fewest)
    gpus, card = planned_gpus(options.gpus, fewest, DEFAULT_CARD, measurement)
    per_node = min(options.gpus_per_node or GPUS_PER_NODE, gpus)
    if options.gpus_per_node and gpus % per_node:
        raise ConfigError(f"command line, --gpus-per-node: {gpus:,} GPUs are no multiple of {per_node}")
    cluster = Cluster(card, gpus, per_node)
    if measurement is not None:
        cluster = cluster._replace(speeds=measurement.speeds)
    job.check(gpus)
    run = planned_run(job, cluster)
    sequences, why_not = _data(job)
    epoch = None if sequences is None else sequences.epoch_sequences
    resolved = job.resolved(gpus, epoch)
    if resolved.amounts():
        raise ConfigError(f"{why_not}, so that epochs cannot be counted: give --tokens=...", "training.steps")
    layout = assess(run, cluster)
    length = _length(resolved, run, epoch, why_not)
    time = None  # a job that does not run takes none
    if layout.verdict != DOES_NOT_FIT:
        guess = _guess(run, measurement)
        time = _time(layout, length, cluster, options.price) | {"guess": guess}
    model = _model(job, run.net)
    plan: dict[str, Any] = {
        "config": options.config,
        "gpus": gpus,
        "gpu": card.name,
        "gpus_per_node": cluster.gpus_per_node,
        "layout": run.layout,
        "model": model,
        "run": length,
        "memory": _memory(layout, cluster),
        "fits": layout.verdict,
        "time": time,
        "checkpoint": {"gib": _checkpoint_bytes(run) / GIB},
        "storage": _storage(job, sequences, time, cluster),
        "optimum": None
        if job.lora.enable or options.fit or run.shape.num_experts
        else _optimum(model["parameters"], length["tokens"]),
        "notes": _notes(run, cluster, measurement, is_timed=bool(time or options.top)),
    }
    if options.mtbf is not None:
        saved, step_s = _checkpoint_size(run, cluster), time["step_s"] if time else None
        steps = length["steps"]
        plan["goodput"] = goodput.section(resolved, options, cluster, measured_run, step_s, steps, saved)
    if options.fit:
        size = model["matmul_parameters"], length["tokens"], length["epochs"]
        plan["law"] = fit.law(options, fit.Target(resolved, *size, sequences, why_not))
    if options.top:
        best, refused = fitting_layouts(run, cluster, _refusal())
        plan["layouts"] = [
            _row(layout, run, length["tokens"]) | {"guess": _guess(layout.run, measurement)}
            for layout in best[: options.top]
        ]
        plan["refused_layouts"] = [vars(layout) for layout in refused]
    return plan


def _refusal() -> Callable[[PlannedRun], str | None]:
    """A function that says why a job cannot use the layout of a run, as `train` would."""

    checked = set[int]()  # tensor-parallel degrees that the optimizer accepts

    def refusal(run: PlannedRun) -> str | None:
        try:
            run.job.check(math.prod(run.degrees))
            if run.degrees.tp not in checked:
                run.job.optimizer.check(run.net, run.degrees.tp)
                checked.add(run.degrees.tp)
        except ConfigError as e:
            return f"{e.key}: {e}"
        return None

    return refusal


def _data(job: Job) -> tuple[RunSequences | None, str]:
    """The sequences of a job, if the data is on this machine; else None, and why not."""
    if job.data.stream is not None:
        return None, "the run trains on a stream"
    try:
        tokenizer = start.open_tokenizer(job)
        sequences = job.data.check(tokenizer, seq_len=job.training.seq_len, seed=job.training.seed)
    except (ConfigError, OSError) as e:
        return None, f"the data is not known here ({e})"
    if sequences is None:
        return None, "the data has not been tokenised yet"
    return sequences, ""


def _model(job: Job, net: Decoder) -> dict[str, Any]:
    sizes = [(p.numel(), p.requires_grad) for p in net.parameters()]
    return {
        "name": job.model.title,
        "parameters": sum(n for n, _ in sizes),
        "trained_parameters": sum(n for n, trained in sizes if trained),
        "matmul_parameters": net.num_matmul_parameters(),
    }


def _length(job: Job, run: PlannedRun, epoch: int | None, why_not: str) -> dict[str, Any]:
    """Steps, tokens, FLOPs and epochs of the whole run. `job`: resolved."""
    batch = BatchLayout.from_training(run.job.training, run.degrees.data_parallel)
    stages, training = job.open_stages(batch.global_size), job.training
    end = stages.step_sizes.position_after(training.steps)
    flops = 0
    for i, first in enumerate(stages.firsts):
        last = max(first, int(min(stages.end_of(i), end)))
        seq_len = training.seq_len // stages.stages[i].num_splits(training.seq_len)
        flops += (last - first) * training.seq_len * run.net.flops_per_token(seq_len)
    return {
        "steps": training.steps,
        "sequences": end,
        "tokens": end * training.seq_len,
        "sequences_per_step": run.global_batch,
        "seq_len": training.seq_len,
        "flops": flops,
        "epochs": None if epoch is None else end / epoch,
        "epochs_unknown": why_not,
    }


def _memory(layout: Layout, cluster: Cluster) -> dict[str, Any]:
    peak = layout.memory.peak
    return {
        "peak_allocated_gib": peak.total / GIB,
        "at_most_gib": at_most([layout.memory]) / GIB,
        "card_gib": cluster.card.memory_gib,
        "peak_at": peak.name,
        "pipeline_rank": layout.memory.pp_rank,
        **{f"{kind}_gib": size / GIB for kind, size in peak.sizes.items()},
    }


def _time(layout: Layout, length: dict[str, Any], cluster: Cluster, price: float | None) -> dict[str, Any]:
    time = layout.time
    hours = length["tokens"] / time.tokens_per_second / 3600
    model_flops = length["flops"] / length["tokens"] * time.tokens_per_second / cluster.gpus
    return {
        "step_s": time.seconds,
        "parts_s": time.parts,
        "bound_by": time.bound_by,
        "tokens_per_second_per_gpu": time.tokens_per_second / cluster.gpus,
        "mfu": model_flops / cluster.card.flops,
        "hours": hours,
        "gpu_hours": hours * cluster.gpus,
        "price": None if price is None else hours * cluster.gpus * price,
    }


def _checkpoint_bytes(run: PlannedRun) -> float:
    """Weights, averages and optimizer state of a checkpoint."""
    trained = [p for p in run.parameters if p.is_trained]
    return sum(math.prod(p.shape) * (4 * (1 + run.job.ema.enable) + p.state_bytes) for p in trained)


def _checkpoint_size(run: PlannedRun, cluster: Cluster) -> Size:
    """The size of a checkpoint on each GPU and each node. Replicas of the model share its writing, but each
    GPU copies its shards to host memory."""
    gib = _checkpoint_bytes(run) / GIB
    nodes = math.ceil(cluster.gpus / cluster.gpus_per_node)
    return Size(gib * run.degrees.dp_replicate / cluster.gpus, gib / nodes)


def _storage(
    job: Job, sequences: RunSequences | None, time: dict[str, Any] | None, cluster: Cluster
) -> dict[str, Any] | None:
    """What a node reads from storages while its cache does not have the sequences, and the cache that holds
    all of them; None without such sources."""
    if not isinstance(sequences, SequenceDataset) or time is None:
        return None
    shares = [(p, entry["share"]) for p, entry in zip(sequences.packed, sequences.shares())]
    remote = [(p.shards, share) for p, share in shares if isinstance(p.shards, RemoteTokens)]
    if not remote:
        return None
    rate = time["tokens_per_second_per_gpu"] * cluster.gpus_per_node  # tokens/s of a node
    num_files = sum(share * (1 + shards.has_loss_mask) for shards, share in remote)
    return {
        "bytes_per_second_per_node": rate * sum(share * shards.bytes_per_token for shards, share in remote),
        "requests_per_second_per_node": rate / job.training.seq_len * num_files,
        "corpus_gib": sum(shards.num_tokens * shards.bytes_per_token for shards, _ in remote) / GIB,
        "cache_gib": job.data.cache_gib,
        "nodes": cluster.gpus // cluster.gpus_per_node,
    }


def _optimum(parameters: float, tokens: float) -> dict[str, float]:
    """The compute-optimal run for as many parameters x tokens, and how much lower its loss is."""
    (best,) = CHINCHILLA.best_parameters(6 * parameters * tokens).tolist()
    excess = CHINCHILLA.loss(parameters, tokens) - CHINCHILLA.loss(best, parameters * tokens / best)
    return {
        "tokens_per_parameter": tokens / parameters,
        "parameters": best,
        "tokens": parameters * tokens / best,
        "excess": float(excess[0]),
    }


def _guess(run: PlannedRun, measurement: Measurement | None) -> list[str]:
    """Why the step time of a run is a guess; empty: it is none."""
    return guesses(run, None if measurement is None else measurement.changed(decisive_keys(run.job)))


def _notes(
    run: PlannedRun, cluster: Cluster, measurement: Measurement | None, *, is_timed: bool
) -> list[str]:
    notes = [measurement.note] if measurement else []
    if run.degrees.tp * run.degrees.cp > cluster.gpus_per_node:
        notes.append("tensor and context parallel span nodes, which is slow: keep them within a node")
    if is_timed and cluster.gpus > cluster.gpus_per_node:
        notes.append(
            "step time across nodes is computed for 400 Gb/s per GPU; no run across nodes was measured"
        )
    if is_timed and cluster.card.name != "H200" and measurement is None:
        evidence = "only H200 was measured"
        if cluster.card.name == "H100":  # benchmarks/results/plan_errors.json
            evidence = "seven runs on H100 took 0.90 to 1.01 times as long"
        notes.append(f"step time takes the shares of the peaks that H200 reaches; {evidence}")
    if run.job.activation_checkpoint.mode == "memory_budget":
        notes.append("activations under memory_budget are interpolated: the compiler chooses them")
    if text := too_many_shards(run.degrees):
        notes.append(text)
    if run.shape.num_experts:
        notes.append(
            "memory of experts was at most 0.5% off in runs on one GPU, and is unmeasured with expert "
            "parallel; tokens are taken to choose all experts equally often"
        )
    if any(shape.is_linear for shape in run.shapes):
        notes.append(
            "planned memory of linear attention was 0.2% off in a run with sequences of 8,192 tokens, and "
            "36% too low in one with sequences of 65,536 tokens under full activation checkpointing"
        )
    optimizer = run.job.optimizer
    rules = {name: group.rule for group, names in optimizer.grouped(run.net).items() for name in names}
    if None in [optimizer.state_bytes(run.net.get_parameter(name), rule) for name, rule in rules.items()]:
        notes.append(f"the state of {run.job.optimizer.name!r} is taken to be two fp32 moments per parameter")
    if run.job.data.mask_documents:
        notes.append("attention is counted over whole sequences; documents that are masked need less time")
    return notes


def _row(layout: Layout, given: PlannedRun, tokens: int) -> dict[str, Any]:
    return {
        "layout": layout.run.layout,
        "local_batch_size": layout.run.job.training.local_batch_size,
        "activation_checkpoint": layout.run.job.activation_checkpoint.mode,
        "peak_allocated_gib": layout.peak_gib,
        "step_s": layout.time.seconds,
        "hours": tokens / layout.time.tokens_per_second / 3600,
        "bound_by": layout.time.bound_by,
        "overrides": layout.overrides(given),
    }


# ---- the plan as text


def _text(plan: dict[str, Any]) -> str:
    parts = [_head(plan), _memory_text(plan), _time_text(plan), _advice(plan)]
    if "goodput" in plan:
        parts.append(goodput.text(plan["goodput"]))
    if plan.get("layouts") is not None:
        parts.append(_layouts_text(plan))
    if plan.get("law") is not None:
        parts.append(fit.text(plan["law"]))
    if plan["notes"]:
        parts.append("\n".join(f"note: {note}" for note in plan["notes"]))
    return "\n\n".join(parts)


def _head(plan: dict[str, Any]) -> str:
    model, run = plan["model"], plan["run"]
    epochs = f"{run['epochs']:.3g}" if run["epochs"] is not None else f"unknown: {run['epochs_unknown']}"
    rows = [
        ["model", f"{model['name']}: {model['parameters']:,} parameters"],
        ["layout", f"{plan['layout']} of {plan['gpus']} x {plan['gpu']}, {plan['gpus_per_node']} per node"],
        ["steps", f"{run['steps']:,} of {run['sequences_per_step']:,} x {run['seq_len']:,} tokens"],
        ["tokens", f"{run['tokens']:,}, {run['tokens'] / model['parameters']:.1f} per parameter"],
        ["FLOPs", f"{run['flops']:.3g}"],
    ]
    lines = [f"{name:8} {text}" for name, text in rows]
    return "\n".join([plan["config"], *lines, f"epochs   {epochs}"])


def _memory_text(plan: dict[str, Any]) -> str:
    memory = plan["memory"]
    rows = [["GiB per rank", f"at the peak: {memory['peak_at']}"]]
    rows += [[kind, f"{memory[f'{kind}_gib']:.2f}"] for kind in KINDS]
    rows.append(["together", f"{memory['peak_allocated_gib']:.2f}"])
    card = f"{plan['gpu']} has {memory['card_gib']:.1f} GiB"
    reserve = f"with what torch reserves beside it up to {memory['at_most_gib']:.1f}"
    return f"{table(rows, num_texts=1)}\n{plan['fits']}: {reserve}; {card}"


def _time_text(plan: dict[str, Any]) -> str:
    time = plan["time"]
    if time is None:
        hint = "" if plan.get("layouts") is not None else ": --top=3 lists the layouts that fit, if any"
        return f"no step time, hours or cost, because this layout does not fit{hint}"
    unit = "CPU" if plan["gpu"] == "CPU" else "GPU"
    digits = 3 if time["step_s"] >= 0.1 else 6
    rows = [["step time", "s", "share"]]
    rows += [[part, f"{s:.{digits}f}", f"{s / time['step_s']:.0%}"] for part, s in time["parts_s"].items()]
    rows.append(["together", f"{time['step_s']:.{digits}f}", ""])
    cost = "" if time["price"] is None else f", {_rounded(time['price'])} in the currency of --price"
    rate = time["tokens_per_second_per_gpu"]
    rate = f"about {short(rate)}" if time["guess"] else f"{rate:,.0f}"
    rate += f" tokens/s per {unit}, MFU {time['mfu']:.1%}"
    hours = f"{time['hours']:,.1f} hours" if time["hours"] >= 2 else f"{60 * time['hours']:.3g} minutes"
    hours += f", {_rounded(time['gpu_hours'])} {unit} hours{cost}"
    text = f"{table(rows, num_texts=1)}\n{rate}; bound by {time['bound_by']}\n{hours}"
    if time["guess"]:
        text += f"\na guess, as are tokens/s, MFU, hours and cost: {'; '.join(time['guess'])}"
    return text


def _advice(plan: dict[str, Any]) -> str:
    saved, best, run = plan["checkpoint"], plan["optimum"], plan["run"]
    size = f"{saved['gib']:.1f} GiB" if saved["gib"] >= 1 else f"{1024 * saved['gib']:.1f} MiB"
    lines = [f"checkpoint: {size}", *_storage_text(plan["storage"])]
    if best is None:  # the law is of dense models trained from scratch; or the runs of --fit have a law
        return "\n".join(lines)
    excess = f"{best['excess']:.2f}" if best["excess"] >= NEAR_OPTIMUM else f"less than {NEAR_OPTIMUM}"
    lines += [
        f"compute-optimal for as many parameters x tokens: {short(best['parameters'])} parameters on "
        f"{short(best['tokens'])} tokens, a loss {excess} nats lower (Besiroglu et al. 2024)",
        f"this run has {best['tokens_per_parameter']:.1f} tokens per parameter; the rule of thumb is {RULE}",
    ]
    if plan["model"]["parameters"] < LEAST_PARAMETERS or run["tokens"] < LEAST_TOKENS:
        least = f"{short(LEAST_PARAMETERS)} parameters and {short(LEAST_TOKENS)} tokens"
        lines[-2] += f"; extrapolated, because the law's runs had at least {least}"
    return "\n".join(lines)


def _storage_text(storage: dict[str, Any] | None) -> list[str]:
    if storage is None:
        return []
    rates = storage["bytes_per_second_per_node"] / 1e6, storage["requests_per_second_per_node"]
    size = 1.1 * storage["corpus_gib"]  # 1.034 in shard_cache_2_cores.json, and some room
    return [
        f"storage: {_rounded(rates[0])} MB/s and {_rounded(rates[1])} requests/s per node for sequences that "
        f"its cache lacks; all of them take {_rounded(size)} GiB, data.cache_gib is {storage['cache_gib']:g}"
    ]


def _rounded(number: float) -> str:
    """A number as an integer, or with two digits if it is below 10."""
    if number >= 10:
        return f"{number:,.0f}"
    return f"{number:.2g}" if number >= 0.01 or number == 0 else "less than 0.01"


def _layouts_text(plan: dict[str, Any]) -> str:
    rows = [["layout", "checkpointing", "bound by", "micro-batch", "GiB", "step s", "hours"]]
    for row in plan["layouts"]:
        numbers = (f"{row['peak_allocated_gib']:.1f}", f"{row['step_s']:.3f}", f"{row['hours']:,.1f}")
        texts = [row["layout"], row["activation_checkpoint"], row["bound_by"], str(row["local_batch_size"])]
        rows.append([*texts, *numbers])
    lines = ["layouts that fit, the fastest first", table(rows, num_texts=3)] if plan["layouts"] else []
    said = [] if plan["time"] is None else plan["time"]["guess"]
    for row in plan["layouts"]:
        more = [reason for reason in row["guess"] if reason not in said]
        guess = f" (the time is a guess: {'; '.join(more)})" * bool(more)
        lines.append(f"{row['layout']}: {' '.join(row['overrides']) or 'as given'}{guess}")
    by_reason = dict[str, list[str]]()
    for row in plan["refused_layouts"]:
        size = f" ({row['peak_gib']:.0f} GiB)" if row["peak_gib"] else ""
        by_reason.setdefault(row["reason"], []).append(row["layout"] + size)
    lines += [f"not {', '.join(layouts)}: {reason}" for reason, layouts in by_reason.items()]
    return "\n".join(lines)
