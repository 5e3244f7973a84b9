"""The fine-tune of docs/finetuning.md, run as on the page, with other rates and lengths beside it.

    python benchmarks/finetune.py MODEL [--folder FOLDER] [--jobs 1]    # runs everything, records the result
    python benchmarks/finetune.py                                       # rewrites docs/finetuning.md

MODEL is the exported model of train_configs/qwen3_30m.toml. The commands are the page's own
(benchmarks/tutorial.py reads them). `--jobs`: how many of the other runs share the device at a time, while
the page's commands run, whose times are no measurement. tests/test_finetuning.py compares page and result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import tutorial  # noqa: E402
from benchmarks.environment import without_paths, write_result  # noqa: E402
from benchmarks.optimizer_tables import paragraph, table, with_tables  # noqa: E402
from titanlite.config import toml  # noqa: E402

PAGE, RESULT = ROOT / "docs/finetuning.md", ROOT / "benchmarks/results/finetune_h200.json"
MODEL, HELD_OUT = Path("models/qwen3-30m"), Path("outputs/conversations/held_out.jsonl")
FULL, ADAPTERS, BEFORE = "outputs/finetuned", "outputs/finetuned_adapters", "before"
LAST_TO_WAIT_FOR = "titanlite data show"  # the command after which everything that a run reads is there
LONG = ["--training.steps=200"]
TRIALS = {  # by name of the run: overrides of finetune.toml
    # One step that changes nothing, because validation follows a step.
    BEFORE: ["--training.steps=1", "--optimizer.lr=1e-30", "--lr_scheduler.warmup_steps=0"],
    "full_5e-5": ["--optimizer.lr=5e-5"],
    "full_5e-4": ["--optimizer.lr=5e-4"],
    "full_2e-4_long": LONG,
    "adapters_5e-4": ["--lora.enable", "--optimizer.lr=5e-4"],
    "adapters_5e-3": ["--lora.enable", "--optimizer.lr=5e-3"],
    "adapters_2e-3_long": ["--lora.enable", "--optimizer.lr=2e-3", *LONG],
}
LOSS, VALIDATION = "train/loss", "eval/loss"


def main() -> None:
    """Run and record, or write what follows from the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--folder", type=Path, help="an empty folder for the runs; default: a temporary one")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if options.model is None:
        result = json.loads(options.output.read_text())
        PAGE.write_text(refreshed(page, result), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        set_up(folder, options.model)
        result = run(page, folder, TRIALS, options.jobs)
    write_result(options.output, result, "torch", "tokenizers")


def set_up(folder: Path, model: Path) -> None:
    """Put into the folder what the page's commands expect there, and a `titanlite` that is this tree's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("assets", "benchmarks", "run_train.sh"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(model, folder / MODEL)
    programs = folder / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("titanlite", "-m titanlite.cli")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    os.environ |= {
        "PATH": os.pathsep.join([str(programs.resolve()), os.environ["PATH"]]),
        "PYTHON": sys.executable,
    }


def run(page: str, folder: Path, trials: Mapping[str, Sequence[str]], jobs: int) -> dict[str, Any]:
    """Run the page's commands, and the trials beside them. Returns what they printed and reported."""
    commands, trying = list[dict[str, Any]](), list[Future[str]]()
    with ThreadPoolExecutor(jobs) as pool:
        for done in tutorial.run(page, folder):
            print(f"{done.seconds:6.1f} s  {done.command}", "\n".join(done.output), sep="", flush=True)
            commands.append(asdict(done))
            if done.command.startswith(LAST_TO_WAIT_FOR):
                trying = [pool.submit(trial, folder, name, options) for name, options in trials.items()]
        for future in trying:
            print(future.result(), flush=True)
    chosen: dict[str, Sequence[str]] = {FULL: [], ADAPTERS: [], **trials}
    env = json.loads((folder / FULL / "env.json").read_text())
    del env["command"], env["platform"]  # they name the machine's folders and kernel
    return {
        "seconds": sum(command["seconds"] for command in commands),
        "env": env,
        "answers_in_library": answers_in_library(folder / HELD_OUT),
        "commands": [command | {"output": plain(command["output"], folder)} for command in commands],
        "runs": {name: reported(folder, name, options) for name, options in chosen.items()},
    }


def plain(lines: Sequence[str], folder: Path) -> list[str]:
    """Lines without the names of this machine's folders."""
    return [without_paths(line).replace(f"{folder.resolve()}/", "") for line in lines]


def trial(folder: Path, name: str, overrides: Sequence[str]) -> str:
    """Run finetune.toml with other settings. Returns the last lines of its output."""
    words = ["./run_train.sh finetune.toml", f"--job.dump_folder=outputs/{name}", *overrides]
    words += ["--checkpoint.interval=1000"]
    done = tutorial.run_command(tutorial.Block("", "bash", "", " ".join(words)), folder)
    if done.exit_code:
        raise RuntimeError(f"{done.command}\nexit code {done.exit_code}\n" + "\n".join(done.output))
    return "\n".join([f"{done.seconds:6.1f} s  {done.command}", *done.output[-4:]])


def reported(folder: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The peak learning rate of a run, whether it trained adapters, and its reports."""
    run_folder = folder / (name if name in (FULL, ADAPTERS) else f"outputs/{name}")
    job = toml.parse((run_folder / "job.toml").read_text())
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return {
        "overrides": list(overrides),
        "lr": job["optimizer"]["lr"],
        "adapters": job["lora"]["rank"] if job["lora"]["enable"] else 0,
        "reports": [json.loads(line) for line in lines],
    }


def answers_in_library(conversations: Path) -> list[int]:
    """How many first answers stand word for word in the Python files of the standard library, and how many
    there are."""
    lines = conversations.read_text(encoding="utf-8").splitlines()
    missing = {json.loads(line)["messages"][1]["content"] for line in lines}
    num_answers = len(missing)
    for path in Path(sysconfig.get_path("stdlib")).rglob("*.py"):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            words = " ".join(path.read_text(encoding="utf-8", errors="replace").split())
            missing = {answer for answer in missing if answer not in words}
    return [num_answers - len(missing), num_answers]


def refreshed(page: str, result: dict[str, Any] | None) -> str:
    """The page with the tables and the output of the result; None: of no result."""
    page = with_tables(page, TABLES, result)
    return page if result is None else tutorial.with_output(page, result)


def lowest(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The report with the lowest held-out loss."""
    return min((report for report in reports if VALIDATION in report), key=lambda report: report[VALIDATION])


def finetune_losses(result: dict[str, Any]) -> str:
    """Losses of the page's two runs, by step."""
    runs, env = result["runs"], result["env"]
    full, adapters = runs[FULL]["reports"], {r["step"]: r for r in runs[ADAPTERS]["reports"]}
    before = f"{runs[BEFORE]['reports'][-1][VALIDATION]:.4f}"
    rows = [["0", "", before, "", before]]
    rows += [
        [
            str(report["step"]),
            *(f"{r[key]:.4f}" for r in (report, adapters[report["step"]]) for key in (LOSS, VALIDATION)),
        ]
        for report in full
        if VALIDATION in report
    ]
    head = ["step", "training loss", "held-out loss", "training loss, adapters", "held-out loss, adapters"]
    num_known, num_answers = result["answers_in_library"]
    num_sequences = full[-1]["progress/sequences"] // full[-1]["step"]
    best = lowest(full)["step"], lowest(list(adapters.values()))["step"]
    words = paragraph(
        f"Each training loss is the mean of one step, {num_sequences} sequences. The held-out loss is lowest",
        f"at step {best[0]}, with adapters at step {best[1]}. Both runs took place on one",
        f"{env['device']} with torch {env['torch']} and Python {env['python']} (`{RESULT.name}`).",
        f"{num_known} of the {num_answers} held-out first answers stand word for word in the standard",
        "library, on which the model was pretrained: the loss falls because the model learns the form of",
        "answers and which text is asked for, and says nothing on unseen functions.",
    )
    return f"{table(head, rows)}\n{words}\n"


def finetune_trials(result: dict[str, Any]) -> str:
    """Lowest and last held-out loss of all runs."""
    rows = []
    for run in sorted(
        (run for name, run in result["runs"].items() if name != BEFORE),
        key=lambda run: (run["adapters"], run["reports"][-1]["step"], run["lr"]),
    ):
        best, last = lowest(run["reports"]), run["reports"][-1]
        rows.append(
            [
                f"adapters of rank {run['adapters']}" if run["adapters"] else "all weights",
                f"{run['lr']:g}",
                str(last["step"]),
                f"{last[LOSS]:.3f}",
                f"{last[VALIDATION]:.4f}",
                f"{best[VALIDATION]:.4f} at step {best['step']}",
            ]
        )
    head = [
        "trained",
        "peak learning rate",
        "steps",
        "last training loss",
        "last held-out loss",
        "lowest held-out loss",
    ]
    return table(head, rows)


TABLES = {"finetune_losses": finetune_losses, "finetune_trials": finetune_trials}

if __name__ == "__main__":
    main()
