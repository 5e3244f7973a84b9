"""300 steps of OLMoE 1B-7B on text, on one GPU: the recorded result, and the table of docs/moe.md.

    titanlite train train_configs/olmoe_1b_7b.toml --tokenizer.name=tiktoken
        --tokenizer.path=assets/tokenizer/stdlib.tiktoken --tokenizer.num_special_tokens=2
        --data.sources='[{name="python_stdlib"}]' --data.holdout_sequences=32 --checkpoint.enable=false
        --training.steps=300 --training.local_batch_size=4 --training.global_batch_size=-1
        --optimizer.state_dtype=int8 --activation_checkpoint.mode=none --parallelism.fsdp_reduce=step
        --validation.freq=100 --metrics.sinks=[] --metrics.detail_freq=50
        --job.dump_folder=FOLDER 2>&1 | tee FOLDER.log
    python benchmarks/olmoe_run.py FOLDER     # records FOLDER and FOLDER.log
    python benchmarks/olmoe_run.py            # rewrites the table of docs/moe.md

`titanlite report` draws the loads of the experts from FOLDER. tests/test_docs.py compares the page with the
result.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import without_paths  # noqa: E402
from benchmarks.optimizer_tables import paragraph, table, with_tables  # noqa: E402

PAGE = ROOT / "docs/moe.md"
CONFIG = "olmoe_1b_7b.toml"
RESULT = ROOT / "benchmarks/results/olmoe_1b_7b_h200.json"
STEPS = (10, 50, 100, 200, 300)  # of the table
SPEED, MFU, MEMORY = (
    "throughput/tokens_per_second_per_device",
    "throughput/mfu",
    "memory/peak_reserved_gib",
)


def main() -> None:
    """Record a run folder, or rewrite the page."""
    if len(sys.argv) > 1:
        RESULT.write_text(json.dumps(recorded(Path(sys.argv[1])), indent=1) + "\n")
    else:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(refreshed(page, json.loads(RESULT.read_text())), encoding="utf-8")


def recorded(folder: Path) -> dict[str, Any]:
    """The result of a run: its files without names of folders."""
    env = json.loads((folder / "env.json").read_text())
    words = [word for word in env.pop("command") if word.startswith("--") and "dump_folder" not in word]
    del env["platform"]
    reports, loads = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "expert_loads.jsonl")
    )
    files = (folder / "job.toml", folder.with_name(f"{folder.name}.log"))
    job, log = (file.read_text().splitlines() for file in files)
    printed = [line for line in log if line.startswith("[rank0]") and "metrics  " not in line]
    return {
        "config": CONFIG,
        "overrides": words,
        "env": env,
        "job": [line for line in job if "dump_folder" not in line],
        "log": [without_paths(line) for line in printed],
        "reports": reports,
        "expert_loads": loads,
    }


def refreshed(page: str, result: dict[str, Any]) -> str:
    """The page with the table of the result."""
    return with_tables(page, {"olmoe": olmoe}, result)


def olmoe(result: dict[str, Any]) -> str:
    """Loss and balance after some steps, and the speed."""
    reports = {report["step"]: report for report in result["reports"]}
    rows = []
    for step in STEPS:
        report = reports[step]
        numbers = [report["moe/max_violation"], report["moe/max_violation_mean"]]
        validation = f"{report['eval/loss']:.3f}" if "eval/loss" in report else ""
        dead = f"{report['moe/dead_experts']:.0f}"
        rows.append(
            [str(step), f"{report['train/loss']:.3f}", validation, *(f"{x:.2f}" for x in numbers), dead]
        )
    head = ["step", "loss", "validation loss", "max violation", "its mean over layers", "dead experts"]
    plain = [r for r in result["reports"] if r["step"] > 100 and "norms/weight" not in r]
    speed, mfu = (statistics.median(report[key] for report in plain) for key in (SPEED, MFU))
    words = paragraph(
        f"{speed:,.0f} tokens/s at an MFU of {mfu:.1%} between detailed reports,",
        f"{max(report[MEMORY] for report in result['reports']):.1f} GiB reserved;",
        f"one {result['env']['device']}, torch {result['env']['torch']} (`{RESULT.name}`).",
    )
    return f"{table(head, rows)}\n{words}\n"


if __name__ == "__main__":
    main()
