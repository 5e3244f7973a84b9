"""`titanlite tune --key=LOW:HIGH:NUM`: searches of real runs, refusals; searches and ladders that stop."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.jobs import ROOT, tiny_arguments
from titanlite import cli
from titanlite.checkpoint.lock import FolderLock
from titanlite.config.component import ConfigError
from titanlite.lab.trial_runs import end_runs, groups_of_gpus
from titanlite.runtime.environment import environment_of_run

RANGE = "--optimizer.lr=1e-3:1e-1:3"
WHOLE = ["--lr_scheduler.total_steps=0", "--validation.enable=true"]


def command(folder: Path, corpus: Path, *words: str) -> list[str]:
    return ["tune", *tiny_arguments(folder, corpus), *WHOLE, *words]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer.lr=1e-3"], "or several values of a key to search: --optimizer.lr=1e-4:3e-3:5"),
        (["--optimizer.lr=1e-3, 2e-3"], "or, without spaces, --optimizer.lr=1e-4,3e-4"),
        (
            ["--training.local_batch_size=1:4:3"],
            "a search compares losses, which this key does not change with a fixed global_batch_size; ",
        ),
        (["--compile.enable=true,false"], "--compile.enable: a search compares losses, which this key does"),
        (
            ["--checkpoint.initial_load_path=a:b,a_b"],  # which changes the loss
            "command line: two of these values have the same letters and digits",
        ),
        (["--optimizer.lr=2:1:3"], "--optimizer.lr: 2:1:3 is not LOW:HIGH:NUM with 0 < LOW < HIGH"),
        (["--optimizer.lr=1e-3:4e-3"], "--optimizer.lr: 1e-3:4e-3 is not LOW:HIGH:NUM"),
        (["--optimizer.lr=1:2:9999"], "--optimizer.lr: only 2 of its 9999 values differ when rounded"),
        (["--optimizer.lr=1,2", "--seeds=3"], "--seeds: 3 is not 1 or 2"),
        (
            ["--optimizer.lr=1,2", "--ladder"],
            "--optimizer.lr: several values are for a search, not for --ladder",
        ),
        (["--optimizer.lrr=0.1:2:3"], "unknown key 'lrr'; did you mean 'lr'?"),
        ([RANGE, "--rungs=0"], "--rungs: 0 is below 1"),
        (
            [RANGE, "--validation.enable=false"],
            "command line, --validation.enable: a search compares validation losses; set this key to true",
        ),
        (["--training.steps=4:8:2"], "--training.steps: a search sets this key itself"),
        (
            ["--optimizer.lr=1e-3:1e-1:5", "--lr_scheduler.total_steps=9"],
            "must end with the run: leave it out",
        ),
        (["--optimizer.name=adamw,muoon"], "unknown optimizer 'muoon'; did you mean 'muon'?"),
        (["--optimizer.lr=1e-3:1e-1:5", '--stages=[{until="end"}]'], "shorter runs would have other parts"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.run(command(tmp_path, corpus, *words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("titanlite: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run_search").exists()


def test_another_search_in_the_folder_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run_search"
    folder.mkdir()
    (folder / "search.json").write_text('{"results": {}, "axes": {"optimizer.lr": ["1"]}}')
    assert cli.run(command(tmp_path, corpus, RANGE)) == 2
    error = capsys.readouterr().err
    assert "holds another search, with another " in error
    assert "optimizer.lr" in error
    assert "job.training.seq_len" in error


def test_a_run_that_does_not_end_is_killed_and_the_others_are_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = "import sys, time; print(flush=True); time.sleep(60)"
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ready}"
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) for code in (deaf, ready)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    end_runs(processes, 0.2)
    assert [process.returncode for process in processes] == [-signal.SIGKILL, -signal.SIGTERM]
    said = f"titanlite: process {processes[0].pid} has not ended 0 s after SIGTERM: killed\n"
    assert capsys.readouterr().err == said
    end_runs(processes, 0.2)  # of ended ones
    for process in processes:
        process.communicate()


@pytest.mark.parametrize(
    ("visible", "num_gpus", "slots"),
    [("", 1, ["0", "1", "2", "3"]), ("2,3,6,7", 2, ["2,3", "6,7"]), ("2,3,6,7", 3, ["2,3,6"])],
)
def test_each_run_has_gpus_to_itself(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_gpus: int, slots: list[str]
) -> None:
    """As many runs at a time as there are groups of GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert groups_of_gpus(num_gpus) == slots
    assert [environment_of_run(slot)["CUDA_VISIBLE_DEVICES"] for slot in slots] == slots
    with pytest.raises(ConfigError, match="--gpus-per-trial: 5, but there are 4 GPUs"):
        groups_of_gpus(5)


def test_the_output_in_the_docs_is_the_recorded_one() -> None:
    recorded = (ROOT / "benchmarks/results/search_debug_2_cores.txt").read_text().partition("\n")[2]
    assert f"```text\n{recorded}```\n" in (ROOT / "docs/tuning.md").read_text()


def stopped_and_continued(
    folder: Path, corpus: Path, kind: str, num_ended: int, *words: str
) -> tuple[str, dict[str, float]]:
    """The output of a command and the losses of its runs, which the same command also has if it is stopped
    after `num_ended` runs, and continued."""
    program = [sys.executable, "-m", "titanlite.cli", *command(folder, corpus, *words)]
    whole, parts = ([*program, f"--output={folder / name}"] for name in ("whole", "parts"))

    def losses(name: str) -> dict[str, float]:
        record = folder / name / f"{kind}.json"
        results = json.loads(record.read_text())["results"] if record.exists() else {}
        return {run: result["loss"] for run, result in results.items()}

    done = subprocess.run(whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    process = subprocess.Popen(parts, stderr=subprocess.PIPE, text=True)
    while len(losses("parts")) < num_ended:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)  # into the next run
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    assert process.stderr is not None
    assert process.stderr.read().endswith(f"the same command continues the {kind} in {folder / 'parts'}\n")
    ended = losses("parts")
    again = subprocess.run(parts, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert not [run for run in ended if f"{run}.log" in again.stderr]
    assert losses("parts") == losses("whole")  # to the bit
    assert again.stdout.replace("/parts", "/whole") == done.stdout
    assert (folder / "whole" / "report.html").stat().st_size > 10_000
    return done.stdout, losses("whole")


@pytest.mark.full
def test_a_stopped_search_continues_to_the_same_end(tmp_path: Path, corpus: Path) -> None:
    words = ["--optimizer.lr=1e-3:1e-1:4", "--optimizer.weight_decay=0.1", "--seeds=2"]
    printed, losses = stopped_and_continued(tmp_path, corpus, "search", 2, *words)
    assert len(losses) == 4 + 3 + 1
    assert printed.startswith("optimizer.lr  loss after 4  loss after 8\n")
    best = min((loss, run) for run, loss in losses.items() if "rung2" in run and "seed" not in run)
    assert f"best: --optimizer.lr={best[1].partition('=')[2]} with {best[0]:.4f}\n" in printed


@pytest.mark.full
def test_a_stopped_ladder_continues_to_the_same_end(tmp_path: Path, corpus: Path) -> None:
    model = {"dim": 64, "n_layers": 8, "n_heads": 8, "hidden_dim": 128}
    words = ["--ladder", "--sizes=40K,0.1M", "--ratios=0.2,0.1"]
    words += [f"--model.overrides.{key}={value}" for key, value in model.items()]
    printed, losses = stopped_and_continued(tmp_path, corpus, "ladder", 1, *words)
    assert list(losses) == [f"size={size},ratio={r}" for size in ("40K", "0.1M") for r in ("0.1", "0.2")]
    assert all(math.isfinite(loss) for loss in losses.values())
    assert f"--fit {tmp_path / 'whole'}\n" in printed


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has died")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_run_of_a_killed_search_saves_and_ends(tmp_path: Path, corpus: Path, num_ranks: int) -> None:
    words = [RANGE, "--rungs=1", "--training.steps=100000", f"--gpus-per-trial={num_ranks}"]
    words += ["--checkpoint.interval=100000", "--validation.freq=100000"]
    process = subprocess.Popen([sys.executable, "-m", "titanlite.cli", *command(tmp_path, corpus, *words)])
    run = tmp_path / "run_search" / "rung1" / "lr=0.001"
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while not list((run / "checkpoint").glob("step-*")):
        assert time.monotonic() < deadline, "it trains on"
        time.sleep(0.05)
    with FolderLock(run) as lock:
        lock.take()  # waits until the run has ended
    assert "SIGTERM: finishing this step and saving" in Path(f"{run}.log").read_text()


@pytest.mark.full
def test_a_run_that_fails_is_named_and_trained_again(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path, corpus, "--optimizer.lr=0.01,0.1", "--rungs=1", "--seeds=1")
    run = tmp_path / "run_search" / "rung1" / "lr=0.01"
    in_the_way = run / "LOCK"
    in_the_way.mkdir(parents=True)
    assert cli.run(words) == 1
    in_the_way.rmdir()
    said = f"rung1/lr=0.01 ended with exit code 2, see {run}.log; the same command trains what is left\n"
    assert capsys.readouterr().err.endswith(said)
    assert cli.run(words) == 0
    output = capsys.readouterr()
    assert "best: --optimizer.lr=" in output.out
    assert output.err.count("run 1 of 1: optimizer.lr=0.01") == 1
