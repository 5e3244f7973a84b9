"""Peak memory and step time of runs that no measurement had seen when `titanlite plan` computed them.

    python benchmarks/blind_points.py predict                    # before the runs, and committed before them
    python benchmarks/blind_points.py measure --gpus 1 --output FILE [--at-once 6] [--limit-s 420]
    python benchmarks/blind_points.py compare                    # the table of errors

blind_points.toml lists the points: training runs with settings that no earlier run in benchmarks/results has.
`measure` trains each of them for a few steps, with the real trainer on real text. Several points share a GPU
as long as their predicted peaks fit together: the memory that a process allocates does not depend on others.
Points with `timed` run alone and for more steps. A point that runs out of memory beside others runs again
alone. The output is written after each point. `--debug` trains models of 2 million parameters on any device,
to try the program."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import without_paths, write_result  # noqa: E402
from benchmarks.lora_memory import write_base  # noqa: E402
from benchmarks.plan_errors import PEAK, RESERVED, STEP  # noqa: E402
from benchmarks.throughput import SHIPPED_DATA  # noqa: E402
from titanlite.config import toml  # noqa: E402
from titanlite.job import Job, load_job  # noqa: E402
from titanlite.lab.cards import CARDS, GIB, Cluster  # noqa: E402
from titanlite.lab.layouts import DOES_NOT_FIT, FITS, verdict  # noqa: E402
from titanlite.lab.memory import rank_memory  # noqa: E402
from titanlite.lab.planned import planned_run  # noqa: E402
from titanlite.lab.step_time import guesses, step_time  # noqa: E402
from titanlite.table import table  # noqa: E402

LIST, RESULTS = ROOT / "benchmarks/blind_points.toml", ROOT / "benchmarks/results"
PREDICTIONS, ERRORS = RESULTS / "blind_points_predictions.json", RESULTS / "blind_points_errors.json"
CONFIG = ROOT / "train_configs/llama3_1b.toml"  # compiled, no activation checkpointing, chunked loss
H200 = next(card for card in CARDS if card.name == "H200")
# Beside the predicted peak of a process: what torch reserves over it, and CUDA's context, so that a
# prediction that is somewhat too low does not take the memory of the other processes.
ROOM_GIB, FACTOR, PROCESS_GIB = 134.0, 1.06, 1.0
STEPS, TIMED_STEPS, COUNTED_AFTER = 4, 8, 2
GRACE_S = 20.0  # from SIGTERM to SIGKILL
DEBUG = [
    "--model.flavor=debug",
    "--training.seq_len=128",
    "--compile.backend=aot_eager",
    "--float8.emulate",
    "--loss.name=cross_entropy",
]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run of blind_points.toml. `keys`: overrides of CONFIG. `timed`: also measure the step time."""

    name: str
    gpus: int = 1
    keys: list[str] = field(default_factory=list)
    timed: bool = False

    @property
    def overrides(self) -> list[str]:
        return [f"--{key}" for key in self.keys]

    @property
    def has_adapters(self) -> bool:
        return any(key.startswith("lora.enable") for key in self.keys)


def points() -> list[Point]:
    """The points of blind_points.toml."""
    return [Point(**point) for point in toml.parse(LIST.read_text())["points"]]


def job_of(point: Point, base: str = "base", also: Sequence[str] = ()) -> tuple[Job, list[str]]:
    """The job of a point, and its overrides. `base`: the folder of the weights that adapters train on."""
    overrides = [*SHIPPED_DATA, *point.overrides, *also]
    if point.has_adapters:
        overrides.append(f"--checkpoint.initial_load_path={base}")
    return load_job(CONFIG, overrides, None), overrides


def plan(point: Point) -> dict[str, Any]:
    """What the plan says now: the peak of rank 0, whose metrics a run reports, and the largest one."""
    job, _ = job_of(point)
    job.check(point.gpus)
    cluster = Cluster(H200, point.gpus)
    run = planned_run(job, cluster)
    memory = rank_memory(run)
    peak = memory[0].peak
    return {
        "planned_gib": round(peak.total / GIB, 3),
        "largest_rank_gib": round(max(rank.peak.total for rank in memory) / GIB, 3),
        "peak_at": peak.name,
        "gib": {kind: round(size / GIB, 3) for kind, size in peak.sizes.items()},
        "fits": verdict(memory, H200.memory_gib),
        "planned_s": round(step_time(run, memory, cluster).seconds, 4),
        "guess": bool(guesses(run)),
    }


def predict() -> None:
    """Write what the plan says of all points, each with the time when it said so. The prediction for a point
    that was measured stays. Raises ValueError if such a point has changed since."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    measured = {run["name"] for run in measured_runs() if "exit_code" in run}
    known = {row["name"]: row for row in json.loads(PREDICTIONS.read_text())["points"]} if measured else {}
    rows = []
    for point in points():
        if point.name not in measured:
            rows.append(vars(point) | plan(point) | {"predicted": now})
        elif vars(point).items() <= known[point.name].items():
            rows.append(known[point.name])
        else:
            raise ValueError(f"{point.name!r} was measured with other settings: give it another name")
    cells = [["point", "GPUs", "GiB", "", "peak at", "step s", ""]]
    for row in rows:
        numbers = [str(row["gpus"]), f"{row['planned_gib']:.2f}", row["fits"], row["peak_at"]]
        cells.append([row["name"], *numbers, f"{row['planned_s']:.3f}", "guess" if row["guess"] else ""])
    print(table(cells))
    write_result(PREDICTIONS, {"config": CONFIG.name, "gpu": H200.name, "points": rows}, "torch")


# ---- measuring


@dataclass
class Run:
    """A point that is being trained. `beside`: the most other points that were trained at the same time."""

    point: Point
    planned_gib: float
    alone: bool
    folder: Path
    process: subprocess.Popen[bytes]
    began: float
    beside: int = 0
    ended_by: str = ""


class Measurement:
    """Trains points as they fit, and writes what they report."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.began = time.monotonic()
        self.running = list[Run]()
        self.results = list[dict[str, Any]]()
        self.bases = dict[str, Future[int]]()  # the weights that adapters train on, as they are written

    def train(self, waiting: list[tuple[Point, float]]) -> None:
        """Train the points, each with its predicted GiB: first those that share a GPU."""
        queue = [(point, gib, self._must_be_alone(point, gib)) for point, gib in waiting]
        queue.sort(key=lambda item: item[2])
        for point, _ in waiting:
            if point.has_adapters:
                self._write_base(point)
        while queue or self.running:
            is_late = time.monotonic() - self.began > self.options.limit_s
            for item in [] if is_late else list(queue):
                if self._has_base(item[0]) and self._has_room(*item[1:]):
                    queue.remove(item)
                    self._start(*item)
            if is_late:
                self._skip(queue)
            for run in list(self.running):
                self._stop_if_late(run)
                if run.process.poll() is not None:
                    self.running.remove(run)
                    result = self._record(run)
                    if result.get("out_of_memory") and run.beside:
                        queue.append((run.point, run.planned_gib, True))
            time.sleep(0.2)

    def _must_be_alone(self, point: Point, gib: float) -> bool:
        return point.timed or self._taken(gib) * 2 > ROOM_GIB or self.options.at_once == 1

    @staticmethod
    def _taken(gib: float) -> float:
        return gib * FACTOR + PROCESS_GIB

    def _has_room(self, gib: float, alone: bool) -> bool:
        if not self.running:
            return True
        if alone or any(run.alone for run in self.running) or len(self.running) >= self.options.at_once:
            return False
        return self._taken(gib) + sum(self._taken(run.planned_gib) for run in self.running) <= ROOM_GIB

    def _base(self, point: Point) -> Path:
        return self.folder / f"base_{points().index(point)}"

    def _write_base(self, point: Point) -> None:
        """In a process of its own, whose memory on the GPU is free afterwards."""
        overrides = [*(key for key in point.overrides if "lora" not in key), *self._steps(point)]
        pool = ProcessPoolExecutor(1, get_context("spawn"))
        self.bases[point.name] = pool.submit(write_base, str(CONFIG), overrides, self._base(point))
        pool.shutdown(wait=False)

    def _has_base(self, point: Point) -> bool:
        return point.name not in self.bases or self.bases[point.name].done()

    def _start(self, point: Point, gib: float, alone: bool) -> None:
        again = sum(result["name"] == point.name for result in self.results)
        folder = self.folder / f"{point.name.replace(' ', '_')}_{again}"
        folder.mkdir(parents=True)
        _, overrides = job_of(point, str(self._base(point)), self._steps(point))
        command = [str(ROOT / "run_train.sh"), str(CONFIG), *overrides, f"--job.dump_folder={folder}/run"]
        threads = 16 if alone else 4  # for an H200 with 16 cores
        env = os.environ | {
            "NGPU": str(point.gpus),
            "PYTHON": sys.executable,
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        }
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        run = Run(point, gib, alone, folder, process, time.monotonic())
        self.running.append(run)
        for other in self.running:
            other.beside = max(other.beside, len(self.running) - 1)
        self._say(f"{point.name}: started beside {len(self.running) - 1}")

    def _steps(self, point: Point) -> list[str]:
        steps, freq = (TIMED_STEPS, 2) if point.timed else (STEPS, 1)
        also = [f"--training.steps={steps}", "--lr_scheduler.warmup_steps=1", f"--metrics.log_freq={freq}"]
        also += [] if point.timed else ["--data.num_workers=0"]  # fewer processes beside each other
        return [*also, *(DEBUG if self.options.debug else [])]

    def _stop_if_late(self, run: Run) -> None:
        late = time.monotonic() - run.began - self.options.timeout_s
        late = max(late, time.monotonic() - self.began - self.options.limit_s - self.options.timeout_s / 2)
        if late > GRACE_S and run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        elif late > 0 and not run.ended_by:
            run.ended_by = "the time limit"
            run.process.terminate()

    def _skip(self, queue: list[tuple[Point, float, bool]]) -> None:
        for point, _, _ in queue:
            self.results.append({"name": point.name, "gpus": point.gpus, "skipped": "the time limit"})
        queue.clear()
        self._write()

    def _record(self, run: Run) -> dict[str, Any]:
        result: dict[str, Any] = {
            "name": run.point.name,
            "gpus": run.point.gpus,
            "beside": run.beside,
            "exit_code": run.process.returncode,
            "wall_s": round(time.monotonic() - run.began, 1),
        }
        metrics, env = run.folder / "run/metrics.jsonl", run.folder / "run/env.json"
        reports = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        if env.exists():
            ran_on = json.loads(env.read_text())
            result["env"] = {k: v for k, v in ran_on.items() if k not in ("command", "platform")}
        lines = (run.folder / "log.txt").read_text(errors="replace").splitlines()
        message = next((line for line in lines if "out of memory " in line or "OutOfMemoryError" in line), "")
        if run.process.returncode:
            result["ended_by"] = run.ended_by or "itself"
            result["log"] = [without_paths(line) for line in lines[-12:]]
            print(*lines[-30:], sep="\n", flush=True)
        if message:
            result["out_of_memory"] = without_paths(message)
        result |= measured(reports, run.point.timed and not run.beside)
        result["reports"] = reports
        self.results.append(result)
        self._write()
        self._say(f"{run.point.name}: " + json.dumps({k: v for k, v in result.items() if k in SHOWN}))
        return result

    def _write(self) -> None:
        about = {"config": CONFIG.name, "commit": self.options.commit, "debug": self.options.debug}
        write_result(self.options.output, {**about, "runs": self.results}, "torch", "torchao")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)


DETAIL = "train/accuracy"  # a metric that only detailed reports have
SHOWN = ("exit_code", "wall_s", "peak_allocated_gib", "peak_reserved_gib", "step_s", "out_of_memory")


def measured(reports: list[dict[str, float]], timed: bool) -> dict[str, float]:
    """The peaks over all reports, and of a run that was alone the median step time."""
    values = {}
    for name, key in (("peak_allocated_gib", PEAK), ("peak_reserved_gib", RESERVED)):
        if any(key in report for report in reports):
            values[name] = max(report[key] for report in reports if key in report)
    steps = [report[STEP] for report in reports if report["step"] > COUNTED_AFTER and STEP in report]
    return values | ({"step_s": statistics.median(steps)} if steps and timed else {})


def measure(options: argparse.Namespace) -> None:
    """Train the points of a number of GPUs."""
    planned = {row["name"]: row["planned_gib"] for row in json.loads(PREDICTIONS.read_text())["points"]}
    chosen = [point for point in points() if point.gpus == options.gpus]
    if options.only:
        chosen = [point for point in chosen if point.name in options.only.split(";")]
    if not chosen:
        sys.exit(f"no points for {options.gpus} GPUs" + (f" named {options.only}" if options.only else ""))
    job, _ = job_of(chosen[0])
    for source in job.data.sources:  # tokenised once, before several processes read it
        source.build(job.tokenizer.build(), ROOT / job.data.cache_dir)
    with tempfile.TemporaryDirectory() as folder:
        Measurement(options, Path(folder)).train(
            [(point, 1.0 if options.debug else planned[point.name]) for point in chosen]
        )


# ---- comparing


def compared(prediction: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of a point, from its prediction and its last run; None: it was not measured."""
    ran = [run for run in runs if run["name"] == prediction["name"] and "exit_code" in run]
    if not ran:
        return None
    run = ran[-1]
    keys = ("name", "gpus", "planned_gib", "fits", "peak_at")
    row: dict[str, Any] = {key: prediction[key] for key in keys}
    row["ran_out"] = "out_of_memory" in run
    if run["exit_code"] == 0:
        row["measured_gib"] = round(run["peak_allocated_gib"], 3)
        row["error"] = round(prediction["planned_gib"] / run["peak_allocated_gib"] - 1, 4)
        row |= _ordinary(run["reports"], row)
        row["reserved_over_allocated"] = round(run["peak_reserved_gib"] / run["peak_allocated_gib"], 3)
    if "step_s" in run and run["exit_code"] == 0:
        row |= {"planned_s": prediction["planned_s"], "measured_s": round(run["step_s"], 4)}
        row |= {"guess": prediction["guess"], "time_error": round(row["planned_s"] / run["step_s"] - 1, 4)}
    return row


def _ordinary(reports: list[dict[str, float]], row: dict[str, Any]) -> dict[str, float]:
    """The peak without steps with detailed reports, which the plan leaves out, and its error; {} if it is the
    same. The first and the last step have such reports."""
    peak = max((report[PEAK] for report in reports if DETAIL not in report), default=row["measured_gib"])
    if row["measured_gib"] - peak < 0.001 * peak:
        return {}
    return {"ordinary_gib": round(peak, 3), "ordinary_error": round(row["planned_gib"] / peak - 1, 4)}


def errors() -> list[dict[str, Any]]:
    """The rows of all measured points. `now`: the peak by the present plan and its error, where they are not
    those of the prediction, without detailed reports."""
    runs, by_name, rows = measured_runs(), {point.name: point for point in points()}, []
    for prediction in json.loads(PREDICTIONS.read_text())["points"]:
        row = compared(prediction, runs)
        if row is None:
            continue
        present = plan(by_name[row["name"]])["planned_gib"]
        if not math.isclose(present, row["planned_gib"], abs_tol=0.0015):
            row["now_gib"] = present
            if "error" in row:
                measured_gib = row.get("ordinary_gib", row["measured_gib"])
                row["now_error"] = round(present / measured_gib - 1, 4)
        rows.append(row)
    return rows


def measured_runs() -> list[dict[str, Any]]:
    """The runs of all points in benchmarks/results."""
    paths = sorted(RESULTS.glob("blind_points_h200*.json"))
    return [run for path in paths for run in json.loads(path.read_text())["runs"]]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The absolute errors of the predictions, and how often a verdict was wrong."""
    memory = [abs(row["error"]) for row in rows if "error" in row]
    ordinary = [abs(row.get("ordinary_error", row["error"])) for row in rows if "error" in row]
    times = [abs(row["time_error"]) for row in rows if "time_error" in row and not row["guess"]]
    counts: dict[str, Any] = {
        "points": len(rows),
        "ran": len(memory),
        "within_5_percent": sum(error <= 0.05 for error in memory),
        "within_5_percent_without_detailed_reports": sum(error <= 0.05 for error in ordinary),
        "ran_out": sum(row["ran_out"] for row in rows),
        "ran_out_though_it_fits": sum(row["ran_out"] and row["fits"] == FITS for row in rows),
        "ran_though_it_does_not_fit": sum("error" in row and row["fits"] == DOES_NOT_FIT for row in rows),
    }
    if memory:
        counts |= {"largest_memory_error": max(memory), "median_memory_error": statistics.median(memory)}
    if times:
        counts |= {"largest_time_error": max(times), "median_time_error": statistics.median(times)}
    return counts


def compare() -> None:
    """Print the table of errors and write it."""
    rows = errors()
    head = ["point", "plan", "GPUs", "planned GiB", "measured", "error", "ordinary steps", "present plan"]
    lines = [[*head, "planned s", "measured", "error"]]
    for row in rows:
        cells = [row["name"], row["fits"], str(row["gpus"]), f"{row['planned_gib']:.2f}"]
        if "error" in row:
            cells.append(f"{row['measured_gib']:.2f}")
        else:
            cells.append("ran out" if row["ran_out"] else "did not run")
        shares = ("error", "ordinary_error", "now_error")
        cells += [f"{row[key]:+.1%}" if key in row else "" for key in shares]
        times = ["", "", ""]
        if "time_error" in row:
            times = [f"{row['planned_s']:.3f}", f"{row['measured_s']:.3f}", f"{row['time_error']:+.1%}"]
            times[0] += " (guess)" * row["guess"]
        lines.append([*cells, *times])
    print(table(lines, num_texts=2))
    print(json.dumps(summary(rows)))
    ERRORS.write_text(json.dumps({"summary": summary(rows), "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Predict, measure or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["predict", "measure", "compare"])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("blind_points.json"))
    parser.add_argument("--only", default="", help="names of points, joined by semicolons")
    parser.add_argument("--at-once", type=int, default=6, help="the most points that share the GPUs")
    parser.add_argument("--timeout-s", type=float, default=150.0, help="for each point")
    parser.add_argument("--limit-s", type=float, default=420.0, help="after which no point begins")
    parser.add_argument("--commit", default="unknown", help="of this checkout, for the record")
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args()
    {"predict": predict, "measure": lambda: measure(options), "compare": compare}[options.mode]()


if __name__ == "__main__":
    main()
