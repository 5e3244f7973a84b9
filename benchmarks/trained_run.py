"""The run of train_configs/qwen3_30m.toml: its recorded result, and what the documentation says of it.

    python benchmarks/trained_run.py FOLDER     # records the result
    python benchmarks/trained_run.py            # rewrites docs/trained.md and the configuration's header
    python benchmarks/trained_run.py --folder outputs/qwen3_30m_h200    # a run folder for titanlite report
    python benchmarks/trained_run.py --picture assets/qwen3_30m.png

FOLDER is what benchmarks/qwen3_30m.sh brings back: the run folder without checkpoints, and text.json. The
other forms read the result. tests/test_docs.py compares page and header with it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import without_paths  # noqa: E402
from benchmarks.optimizer_tables import paragraph, table, with_tables  # noqa: E402
from titanlite.config import toml  # noqa: E402
from titanlite.config.amount import Amount  # noqa: E402

CONFIG, PAGE = ROOT / "train_configs/qwen3_30m.toml", ROOT / "docs/trained.md"
RESULT = ROOT / "benchmarks/results/qwen3_30m_h200.json"
PICTURE = "assets/qwen3_30m.png"
FILES = ("events.jsonl", "job.toml", "sources.json", "run_identity.json", "samples.txt")
TEXT, LEGS = "text.json", "leg*.log"
SOURCES, TASKS = ("code", "c", "prose"), ("next_line", "last_word")
TOKENS, SEQUENCES = "progress/total_tokens", "progress/sequences"
SPEED, MFU, MEMORY = (
    "throughput/tokens_per_second_per_device",
    "throughput/mfu",
    "memory/peak_reserved_gib",
)
HEADER = re.compile(r"(# Measured: ).*?(?=\n\n)|# Unmeasured\.", re.DOTALL)

Report = dict[str, Any]  # one line of metrics.jsonl


def main() -> None:
    """Record a run folder, or write what follows from the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--folder", type=Path, help="write the recorded run as a run folder here")
    parser.add_argument("--picture", type=Path, help="draw the validation curves into this file")
    options = parser.parse_args()
    if options.run is not None:
        options.output.write_text(json.dumps(recorded(options.run), indent=1) + "\n")
        return
    result = json.loads(options.output.read_text())
    if options.folder is not None:
        write_folder(result, options.folder)
    elif options.picture is not None:
        draw(result, options.picture)
    else:
        for file, refresh in ((PAGE, refreshed), (CONFIG, with_header)):
            file.write_text(refresh(file.read_text(encoding="utf-8"), result), encoding="utf-8")


def recorded(folder: Path) -> dict[str, Any]:
    """The result of a run: a summary, and the files of its folder."""
    reports = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    env = json.loads((folder / "env.json").read_text())
    del env["command"], env["platform"]  # they name the machine's folders and kernel
    files = {name: without_paths((folder / name).read_text()) for name in FILES}
    text = json.loads((folder / TEXT).read_text())
    job = toml.parse(files["job.toml"])
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    return {
        "config": CONFIG.name,
        "summary": {
            "tokens": reports[-1][TOKENS],
            "steps": reports[-1]["step"],
            **{
                key: sum(report.get(f"time/{key}", 0.0) for report in reports)
                for key in ("validation_s", "tasks_s")
            },
            "memory_gib": max(report.get(MEMORY, 0.0) for report in reports),
            "stages": stage_summaries(reports, job),
            "epochs": epochs(reports, job, json.loads(files["sources.json"])["sources"]),
            "legs": (commands := legs(events)),
            "seconds": sum(leg["seconds"] for leg in commands),
        },
        "text": text,
        "env": env,
        "files": files,
        "logs": {path.name: without_paths(path.read_text()) for path in sorted(folder.glob(LEGS))},
        "reports": reports,
    }


def stage_ends(job: dict[str, Any]) -> list[float]:
    """The number of the sequence that each stage ends before."""
    seq_len = job["training"]["seq_len"]
    ends = []
    for stage in job["stages"]:
        if stage["until"] == "end":
            ends.append(float("inf"))
            continue
        amount = Amount.parse(stage["until"])
        ends.append(int(amount.value / {"tokens": seq_len, "sequences": 1}[amount.unit]))
    return ends


def by_stage(reports: Sequence[Report], job: dict[str, Any]) -> list[list[Report]]:
    """The reports of each stage: those whose last sequence belongs to it."""
    begins = [0, *stage_ends(job)]
    return [
        [report for report in reports if begin < report[SEQUENCES] <= end] for begin, end in pairwise(begins)
    ]


def stage_summaries(reports: Sequence[Report], job: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps, tokens, sizes, speed and the last validation of each stage."""
    result = []
    before: Report = {"step": 0, TOKENS: 0}
    for stage, mine in zip(job["stages"], by_stage(reports, job), strict=True):
        last = mine[-1]
        pairs = list(pairwise(mine))
        validation = next(report for report in reversed(mine) if "eval/loss" in report)
        sizes = {round((b[TOKENS] - a[TOKENS]) / (b["step"] - a["step"])) for a, b in pairs}
        result.append(
            {
                "name": stage["name"],
                "seq_len": stage.get("seq_len") or job["training"]["seq_len"],
                "steps": last["step"] - before["step"],
                "tokens": last[TOKENS] - before[TOKENS],
                "tokens_per_step": sorted(sizes),
                "learning_rates": [mine[0]["train/learning_rate"], last["train/learning_rate"]],
                "tokens_per_second": statistics.median(report[SPEED] for report in mine[1:]),
                "mfu": statistics.median([report[MFU] for report in mine[1:] if MFU in report] or [0.0]),
                "validated_at": validation["step"],
                **{key: value for key, value in validation.items() if key.startswith(("eval/", "tasks/"))},
            }
        )
        before = last
    return result


def epochs(
    reports: Sequence[Report], job: dict[str, Any], sources: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The epochs that each stage reads of each source, and the sequences in an epoch."""
    names = {Path(source["path"]).name: source["weight"] for source in job["data"]["sources"]}
    sizes = {Path(source["source"].split()[-1]).name: source["sequences"] for source in sources}
    result: dict[str, dict[str, Any]] = {}
    begin = 0
    for stage, mine in zip(job["stages"], by_stage(reports, job), strict=True):
        weights = stage.get("weights") or names
        weights = weights if isinstance(weights, dict) else dict(zip(names, weights))
        sequences, begin = mine[-1][SEQUENCES] - begin, mine[-1][SEQUENCES]
        for name, size in sizes.items():
            share = weights.get(name, 0) / sum(weights.values())
            entry = result.setdefault(name, {"sequences": size, "stages": []})
            entry["stages"].append(sequences * share / size)
    return result


def legs(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The commands that the run took: the step that each began with, the last one that it saved, and the
    seconds between."""
    result: list[dict[str, Any]] = []
    for event in events:
        time = datetime.fromisoformat(event["time"])
        if event["event"] in ("started", "resumed"):
            result.append({"first_step": event["step"] + 1, "began": time})
        elif event["event"] == "saved":
            result[-1] |= {"last_step": event["step"], "seconds": (time - result[-1]["began"]).seconds}
    return [{key: value for key, value in leg.items() if key != "began"} for leg in result]


def refreshed(page: str, result: dict[str, Any] | None) -> str:
    """The page with the tables of the result; None: of no result."""
    return with_tables(page, TABLES, result)


def with_header(config: str, result: dict[str, Any]) -> str:
    """The configuration with the numbers of the result in its first comment."""
    summary, stages = result["summary"], result["summary"]["stages"]
    last, speed = stages[-1], stages[1]
    words = [
        f"Measured: {summary['tokens'] / 1e6:.0f}e6 tokens on one {result['env']['device']} with torch",
        f"{result['env']['torch']} took {summary['seconds'] / 60:.1f} minutes in {len(summary['legs'])}",
        f"commands, {speed['tokens_per_second']:,.0f} tokens/s at an MFU of {speed['mfu']:.1%} in the main",
        f"stage and {summary['memory_gib']:.1f} GiB of peak memory. Final validation loss",
        f"{last['eval/loss']:.3f}; bits per byte",
        f"{', '.join(f'{bits(last, name):.3f} ({name})' for name in SOURCES)}; accuracy",
        f"{', '.join(f'{accuracy(last, name):.1%} ({name})' for name in TASKS)}. docs/trained.md has the",
        "curve.",
    ]
    comment = "\n".join(f"# {line}" for line in paragraph(*words).split("\n"))
    return HEADER.sub(comment, config, count=1)


def bits(stage: dict[str, Any], source: str) -> float:
    """The bits per byte on held-out text of a source."""
    return float(stage[f"eval/{source}/bits_per_byte"])


def accuracy(stage: dict[str, Any], task: str) -> float:
    """The accuracy in a task."""
    return float(stage[f"tasks/{task}/acc"])


def trained_text(result: dict[str, Any]) -> str:
    """The sources, with the epochs that each stage reads of them."""
    names = [stage["name"] for stage in result["summary"]["stages"]]
    rows = []
    for source in SOURCES:
        kind, read = result["text"]["kinds"][source], result["summary"]["epochs"][source]
        rows.append(
            [
                f"`{source}`",
                f"{kind['train']['documents']:,}",
                f"{kind['train']['tokens'] / 1e6:.1f} million",
                f"{kind['held_out']['tokens'] / 1e6:.2f} million",
                *(f"{number:.2f}" for number in [*read["stages"], sum(read["stages"])]),
            ]
        )
    head = ["source", "documents", "tokens", "held out", *(f"epochs in {name}" for name in names), "epochs"]
    return table(head, rows)


def trained_stages(result: dict[str, Any]) -> str:
    """The stages, with the validation at the end of each."""
    rows = []
    for stage in result["summary"]["stages"]:
        first, last = stage["learning_rates"]
        rows.append(
            [
                f"`{stage['name']}`",
                f"{stage['tokens'] / 1e6:.0f} million",
                f"{stage['steps']:,}",
                f"{stage['seq_len']:,}",
                " to ".join(f"{number:,}" for number in stage["tokens_per_step"]),
                f"{first:.1e} to {last:.1e}",
                f"{stage['tokens_per_second'] / 1e6:.2f} million",
            ]
        )
    sizes = ["stage", "tokens", "steps", "sequences of", "tokens per step", "learning rate", "tokens/s"]
    return table(sizes, rows)


def trained_losses(result: dict[str, Any]) -> str:
    """Validation by source and tasks at the end of each stage, and what the last stage changed."""
    stages = result["summary"]["stages"]
    rows = [
        [
            f"`{stage['name']}`",
            f"{stage['validated_at']:,}",
            f"{stage['eval/loss']:.4f}",
            *(f"{bits(stage, name):.4f}" for name in SOURCES),
            *(f"{accuracy(stage, name):.1%} ± {stage[f'tasks/{name}/acc_stderr']:.1%}" for name in TASKS),
        ]
        for stage in stages
    ]
    tasks = result["text"]["tasks"]
    chance = ["chance", *[""] * 5, *(f"{tasks[name]['chance']:.1%}" for name in TASKS)]
    head = ["end of", "step", "loss", *(f"bits per byte, `{name}`" for name in SOURCES)]
    head += [f"`{name}`, {tasks[name]['questions']} questions" for name in TASKS]
    changes = ", ".join(
        f"`{name}` by {bits(stages[1], name) - bits(stages[2], name):.4f}" for name in SOURCES
    )
    summary = result["summary"]
    words = paragraph(
        f"From the end of the main stage to the end of the decay, the bits per byte fall: {changes}.",
        f"The run took {summary['seconds'] / 60:.1f} minutes on one {result['env']['device']} with torch",
        f"{result['env']['torch']}, of which validation took {summary['validation_s']:.0f} s and the tasks",
        f"{summary['tasks_s']:.0f} s, in {len(summary['legs'])} commands:",
        "; ".join(
            f"steps {leg['first_step']:,} to {leg['last_step']:,} in {leg['seconds']} s"
            for leg in summary["legs"]
        )
        + f" (`{RESULT.name}`).",
    )
    return f"{table(head, [*rows, chance])}\n{words}\n"


TABLES = {
    "trained_text": trained_text,
    "trained_stages": trained_stages,
    "trained_losses": trained_losses,
}


def write_folder(result: dict[str, Any], folder: Path) -> None:
    """Write the recorded run as a run folder, for `titanlite report`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {**result["files"], **result["logs"], "env.json": json.dumps(result["env"])}
    files["metrics.jsonl"] = "".join(json.dumps(report) + "\n" for report in result["reports"])
    for name, text in files.items():
        (folder / name).write_text(text)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw bits per byte by source and the accuracy in the tasks, by tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reports = [report for report in result["reports"] if "eval/loss" in report]
    tokens = [report[TOKENS] / 1e6 for report in reports]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), dpi=120)
    for name in SOURCES:
        axes[0].plot(tokens, [bits(report, name) for report in reports], label=name, linewidth=1.6)
    for name in TASKS:
        axes[1].plot(tokens, [100 * accuracy(report, name) for report in reports], label=name, linewidth=1.6)
    at = 0.0
    for stage in result["summary"]["stages"][:-1]:
        at += stage["tokens"] / 1e6
        for panel in axes:
            panel.axvline(at, color="#bbbbbb", linewidth=0.8, zorder=0)
    lowest = min(bits(reports[-1], name) for name in SOURCES)
    axes[0].set(xlabel="million tokens", ylabel="bits per byte of held-out text", ylim=(lowest - 0.1, None))
    axes[1].set(xlabel="million tokens", ylabel="accuracy (%)")
    for panel in axes:
        panel.legend(frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
