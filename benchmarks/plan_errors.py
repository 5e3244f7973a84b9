"""What `titanlite plan` computes for every recorded run with a peak of its memory, beside what was measured.

    python benchmarks/plan_errors.py [--output benchmarks/results/plan_errors.json]

The runs are on one to four H200, and on one or two H100. Nothing runs on a GPU here. The counts in
titanlite/lab were found from some of these runs, as its comments say: the table shows how well they
describe the runs, and is no forecast.

`before`: runs by versions that held other buffers. They are listed, and not in the summary. `guess`: whether
the plan calls the step time a guess. Its errors have a line of their own in the summary."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import layer_kinds, same_bits  # noqa: E402
from titanlite.job import load_job  # noqa: E402
from titanlite.lab.cards import CARDS, GIB, Cluster  # noqa: E402
from titanlite.lab.memory import rank_memory  # noqa: E402
from titanlite.lab.planned import planned_run  # noqa: E402
from titanlite.lab.step_time import guesses, step_time  # noqa: E402
from titanlite.table import table  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PEAK, RESERVED, STEP = "memory/peak_allocated_gib", "memory/peak_reserved_gib", "time/step_s"
# Earlier versions freed small models after the forward, sharded embedding and head with the root module, or
# kept transposed copies of 8-bit weights for the backward.
BEFORE = ("llama3_1b_h200x4_b16_torchtitan", "llama3_1b_h200x4_b8", "llama3_1b_h200x4_b8_flex",
          "llama3_1b_h200x4_b8_varlen", "llama3_8b_float8_h200x2_b1_torchtitan",
          "llama3_8b_float8_h200x4_b2_torchtitan", "llama3_8b_float8_h200x4_default_torchtitan")  # fmt: skip
# By their times, several runs shared the GPU: a step of memory_h200 took four times as long as the same step
# of guard_h200, and those of float8_curve_h200 became up to four times as fast near the end. The searches of
# transfer_lr_h200*.json shared it.
TRANSFER = tuple(f"transfer_lr_h200{part}" for part in ("", "_seeds", "_seeds_more"))
UNTIMED = ("memory_h200", "float8_curve_h200", *TRANSFER)
# The plan omits the temporary buffers of a gated delta net's backward (titanlite/lab/activations.py).
UNCOUNTED = ("gated_delta_net_65536_h200",)
# finetune.toml of docs/finetuning.md, as overrides of debug.toml.
FINETUNE = {
    "model.name": "qwen3",
    "model.overrides.dim": 512,
    "model.overrides.n_layers": 8,
    "model.overrides.n_heads": 8,
    "model.overrides.n_kv_heads": 4,
    "model.overrides.head_dim": 64,
    "model.overrides.hidden_dim": 1280,
    "model.overrides.vocab_size": 16384,
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "training.global_batch_size": 4,
}
LORA = ["--lora.enable", "--checkpoint.initial_load_path=base"]
GRAPHS = "--compile.cuda_graphs"  # torch's peak does not count the memory within graphs
# The default of fsdp_reshard_after_forward in the versions that made these runs; now it keeps what fits.
FREES = ["--parallelism.fsdp_reshard_after_forward=always"]
FREED = ("llama3_8b_float8_h200x2_b1_torchtitan", "llama3_8b_float8_h200x4_b2_torchtitan",
         "llama3_8b_h200x2_b1_torchtitan", "llama3_8b_h200x4_b2_torchtitan")  # fmt: skip
LAYOUTS = {
    "shard": ["--parallelism.fsdp_reduce=micro_batch", *FREES],
    "tensor2": ["--parallelism.fsdp_reduce=micro_batch", "--parallelism.tensor_parallel_degree=2"],
    "context2": ["--parallelism.fsdp_reduce=micro_batch", "--parallelism.context_parallel_degree=2", *FREES],
    "pipeline2": ["--parallelism.pipeline_parallel_degree=2"],
}


class Recorded(NamedTuple):
    """A run of benchmarks/results. `case`: of the file."""

    file: str
    case: str
    config: str
    overrides: list[str]
    gpus: int
    measured: dict[str, float]


def recorded() -> Iterator[Recorded]:
    """All recorded runs with a peak of their memory."""
    for path in sorted(RESULTS.glob("*.json")):
        if path.stem == "plan_errors":
            continue
        result = json.loads(path.read_text())
        for case, overrides, measured in _cases(path.stem, result):
            if PEAK in measured and GRAPHS not in overrides:
                gpus = int(result.get("ngpu", 1 if "h200x2" not in path.stem else 2))
                # Keys of [metrics] do not change the memory, and an old file may name one that is gone.
                overrides = [word for word in overrides if not word.startswith("--metrics.")]
                yield Recorded(path.stem, case, result.get("config", "debug.toml"), overrides, gpus, measured)
    path = RESULTS / "llama3_8b_6layers_h200x2_tensor_float8.txt"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    for case, line in (("bf16", lines[0]), ("float8", lines[-1])):  # the last line: as titanlite does now
        overrides = [word for word in line["overrides"] if "job.imports" not in word]
        yield Recorded(path.stem, case, line["config"], overrides, 2, line["medians"])


def _cases(name: str, result: dict[str, Any]) -> Iterator[tuple[str, list[str], dict[str, float]]]:
    """Case, overrides and measurements of the runs of one file."""
    given = result.get("overrides") or []
    if name.startswith("same_bits_") and "medians" in result:
        for case, medians in result["medians"].items():
            yield case, [*given, *same_bits.VARIANTS[case]], medians
    elif name.startswith("windows_"):
        for case, medians in result["medians"].items():
            yield case, [*given, f"--model.overrides={layer_kinds.WINDOWS[case]}"], medians
    elif name.startswith("gated_delta_net_"):
        for seq_len in layer_kinds.LENGTHS:
            if part := result.get(str(seq_len)):
                yield str(seq_len), layer_kinds.delta_keys(seq_len), part["medians"]
    elif "medians" in result:
        yield "", [*given, *(FREES if name in FREED else [])], result["medians"]
    elif name == "activation_checkpointing_h200":
        for case in result["cases"]:
            yield case["name"], [*given, *_checkpointing(case["name"])], _medians(case["counted"])
    elif name == "memory_h200":
        for case in result["cases"]:
            loss, size = case["loss"], case["vocab_size"]
            overrides = [f"--loss.name={loss}", f"--model.overrides.vocab_size={size}"]
            yield f"{loss} {size}", [*given, *overrides], _medians(case["reports"])
    elif name.startswith("layouts_"):
        for case in result["layouts"]:
            yield case["layout"], [*given, *LAYOUTS[case["layout"]]], case["medians"]
    elif name.startswith(("optimizer_steps", "optimizer_fixed_weights")):
        shape = {"compile.enable": "true", "training.seq_len": 2048, "training.local_batch_size": 16}
        shape["training.global_batch_size"] = result["tokens_per_step"] // 2048
        keys = [f"--{key}={value}" for key, value in shape.items()]
        for case, summary in result["summaries"].items():
            if not case.startswith("torch"):  # optimizers from outside the package
                yield case, [*keys, *given, *result["keys"][case]], summary
    elif name == "optimizer_curves_h200":
        for case in ("adamw_lr0.0015_seed0", "muon_lr0.003_seed0", "adamw_int8_lr0.0015_seed0"):
            run = result["runs"][case]
            yield case.partition("_lr")[0], run["keys"], _medians(run["reports"])
    elif name == "qwen3_30m_h200":
        short = result["summary"]["stages"][0]  # of short sequences and smaller batches
        yield "", given, _medians([r for r in result["reports"] if r["step"] > short["steps"]])
    elif name == "watching_h200":
        for case, keys in result["keys"].items():
            reports = [report for run in result["runs"][case] for report in run["counted"]]
            yield case, [*given, *keys], _medians(reports)
    elif name == "lora_memory_h200":
        for case, run in result["cases"].items():
            yield case, [*given, *(LORA if run["rank"] else [])], run["medians"]
    elif name == "finetune_h200":
        for case in ("outputs/finetuned", "outputs/finetuned_adapters"):  # others may have shared the GPU
            run = result["runs"][case]
            overrides = [f"--{key}={value}" for key, value in FINETUNE.items()]
            yield case, [*overrides, *(LORA if run["adapters"] else [])], _medians(run["reports"])
    elif name == "olmoe_1b_7b_h200":
        yield "", given, _medians(result["reports"])
    elif name in TRANSFER:
        for case in ("narrow", "rules"):
            search = result["searches"][case]
            if not search["runs"]:
                continue
            yield case, search["keys"], _medians([run["last"] for run in search["runs"]])
    elif name == "pointwise_autotune_h200":
        for run in result["cases"]:
            case = "float8" if "--float8.enable" in run["overrides"] else "bf16"
            yield f"{case} on GPU {run['gpu']}, batch {run['batch']}", run["overrides"], run["medians"]
    elif name == "compiler_settings_8b_h100":
        for run in result["cases"]:
            variables = " ".join(f"{key}={value}" for key, value in run["environment_variables"].items())
            yield variables or "none", run["overrides"], run["medians"]
    elif name == "float8_curve_h200":
        for case, curve in result["curves"].items():
            recipe = case.partition(" ")[2] if case.startswith("float8") else ""
            overrides = ["--float8.enable", f"--float8.recipe={recipe}"] if recipe else []
            if "other" not in case:
                yield case, [*given, *overrides], _medians(curve)


def _checkpointing(name: str) -> list[str]:
    key = "--activation_checkpoint."
    if name == "full":
        return [f"{key}mode=full"]
    if name.startswith("budget"):
        return [f"{key}mode=memory_budget", f"{key}memory_budget={name.split()[1]}"]
    return [f"{key}mode=selective", f"{key}selective_ac_option={name}"]


def _medians(reports: list[dict[str, float]]) -> dict[str, float]:
    """The largest peak and the median step time of reports."""
    largest = {key: max((r[key] for r in reports if key in r), default=0.0) for key in (PEAK, RESERVED)}
    steps = [r[STEP] for r in reports if STEP in r]
    return {key: value for key, value in largest.items() if value} | (
        {STEP: statistics.median(steps)} if steps else {}
    )


def config_path(run: Recorded) -> Path:
    """The TOML file of a run."""
    own = run.config in ("optimizer_curves.toml", "transfer_lr.toml")
    return ROOT / ("benchmarks" if own else "train_configs") / f"{Path(run.config).stem}.toml"


def compare(run: Recorded) -> dict[str, Any]:
    """The planned and the measured numbers of a run: of rank 0, which has the first pipeline stage."""
    job = load_job(config_path(run), run.overrides, None)
    name = "H100" if "_h100" in run.file else "H200"
    cluster = Cluster(next(card for card in CARDS if card.name == name), run.gpus)
    planned = planned_run(job, cluster)
    memory = rank_memory(planned)
    peak = memory[0].peak.total / GIB
    row: dict[str, Any] = {
        "file": run.file,
        "case": run.case,
        "before": run.file in BEFORE,
        "planned_gib": round(peak, 3),
        "measured_gib": round(run.measured[PEAK], 3),
        "error": round(peak / run.measured[PEAK] - 1, 4),
        "peak_at": memory[0].peak.name,
    }
    if RESERVED in run.measured:
        row["reserved_over_allocated"] = round(run.measured[RESERVED] / run.measured[PEAK], 3)
    if STEP in run.measured and run.file not in UNTIMED:
        seconds = step_time(planned, memory, cluster).seconds
        row |= {"planned_s": round(seconds, 4), "measured_s": round(run.measured[STEP], 4)}
        row["guess"] = bool(guesses(planned))
        row["time_error"] = round(seconds / run.measured[STEP] - 1, 4)
    return row


def text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = ["file", "case", "planned GiB", "measured", "error", "planned s", "measured", "error"]
    lines = [head]
    for row in rows:
        cells = [row["file"] + " (before)" * row["before"], row["case"]]
        cells += [f"{row['planned_gib']:.2f}", f"{row['measured_gib']:.2f}", f"{row['error']:+.1%}"]
        times = ["", "", ""]
        if "time_error" in row:
            times = [f"{row['planned_s']:.3f}", f"{row['measured_s']:.3f}", f"{row['time_error']:+.1%}"]
            times[0] += " (guess)" * row["guess"]
        lines.append([*cells, *times])
    return table(lines, num_texts=2)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The largest and the median absolute errors of the runs by present versions. Those of memory are without
    the runs of UNCOUNTED, which have an error of their own."""
    counted = [row for row in rows if not row["before"]]
    memory = [abs(row["error"]) for row in counted if row["file"] not in UNCOUNTED]
    too_little = [abs(row["error"]) for row in counted if row["file"] in UNCOUNTED]
    timed = [row for row in counted if "time_error" in row]
    times = [abs(row["time_error"]) for row in timed if not row["guess"]]
    guessed = [abs(row["time_error"]) for row in timed if row["guess"]]
    return {
        "runs": len(counted),
        "largest_memory_error": max(memory),
        "median_memory_error": statistics.median(memory),
        "largest_memory_error_of_uncounted_runs": max(too_little),
        "largest_time_error": max(times),
        "median_time_error": statistics.median(times),
        "guessed_times": len(guessed),
        "largest_error_of_guessed_times": max(guessed),
        "largest_reserved_over_allocated": max(row.get("reserved_over_allocated", 0) for row in counted),
    }


def main() -> None:
    """Print the table and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "plan_errors.json")
    options = parser.parse_args()
    rows = [compare(run) for run in recorded()]
    print(text(rows))
    print(json.dumps(summary(rows)))
    options.output.write_text(json.dumps({"summary": summary(rows), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
