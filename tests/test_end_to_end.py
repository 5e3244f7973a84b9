"""The commands of the README as a user types them: the debug run, several ranks, several nodes, and how they
fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.readme_log import quoted_lines, shape
from tests.support.jobs import ROOT, tiny_arguments
from tests.support.launcher import launch, path_with
from titanlite import cli

PLUGIN = """
import os
from dataclasses import dataclass
import torch
from titanlite.optim.adamw import AdamW

@dataclass(frozen=True, kw_only=True)
class Dying(AdamW, name="dying"):
    "AdamW that ends the process of rank 1 at its third step, the first time."

    def build(self, model, mesh):
        optimizer, steps = super().build(model, mesh), []
        def die(*args):
            steps.append(0)
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
            if len(steps) == 3 and first and os.environ["RANK"] == "1":
                os._exit(7)
        optimizer.register_step_pre_hook(die)
        return optimizer
"""


def test_the_debug_run_learns_and_says_where_everything_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "debug"
    shorter = [
        "--training.steps=24",
        "--training.global_batch_size=4",
        "--data.holdout_sequences=16",
        "--generation.max_new_tokens=16",
        f"--job.dump_folder={folder}",
        f"--data.cache_dir={tmp_path / 'cache'}",
    ]
    run = launch("debug", *shorter)
    assert run.returncode == 0, run.stderr
    assert "tokenising into" in run.stderr
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["train/loss"] - metrics[-1]["train/loss"] > 1.5
    assert metrics[0]["train/loss"] - metrics[-1]["eval/loss"] > 1.5
    for line in (
        "sample at step 24:\ndef main(",
        "validation loss ",
        f"metrics      {folder / 'metrics.jsonl'}",
    ):
        assert line in run.stderr
    log = run.stderr.replace(str(folder), "outputs/debug").replace(str(tmp_path / "cache"), "outputs/cache")
    printed = {shape(line) for line in log.splitlines()}
    for line in quoted_lines():
        assert shape(line) in printed or not line.startswith("[rank0]"), f"the README quotes {line}"
    assert list((folder / "tb").glob("events.*"))
    assert (folder / "checkpoint/step-24/manifest.json").exists()
    assert (folder / "samples.txt").read_text().startswith("--- step 24\ndef main(")

    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    capsys.readouterr()
    assert cli.run(["train", "debug", *shorter]) == 0
    assert "nothing to train: step 24 is done" in capsys.readouterr().err
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == steps

    samples = []
    for _ in range(2):
        assert (
            cli.run(["generate", str(folder), "--prompt", "import ", "--seed", "1", "--max-new-tokens", "16"])
            == 0
        )
        samples.append(capsys.readouterr().out)
    assert samples[0].startswith("import ")
    assert samples[0] == samples[1]


@pytest.mark.full
def test_the_code_of_the_rank_that_failed_comes_through(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "dying.py").write_text(PLUGIN)
    plugin = ['--job.imports=["dying"]', "--optimizer.name=dying"]
    run = launch(*tiny_arguments(tmp_path, corpus), *plugin, NGPU="2", PYTHONPATH=path_with(tmp_path))
    assert run.returncode == 7, run.stderr
    assert "rank 1 ended with exit code 7" in run.stderr


@pytest.mark.full
def test_no_usable_checkpoint_is_3(tmp_path: Path, corpus: Path) -> None:
    bad = tmp_path / "run/checkpoint/step-4"
    bad.mkdir(parents=True)
    (bad / "manifest.json").write_text("{}")
    run = launch(*tiny_arguments(tmp_path, corpus), NGPU="2", MAX_RESTARTS="2")
    assert run.returncode == 3, run.stderr
    assert run.stderr.count("no usable checkpoint") == 1
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.full
def test_input_that_cannot_be_read_is_2_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n')
    (tmp_path / "b.txt").write_bytes(b"abc\xff")
    run = launch(*tiny_arguments(tmp_path, tmp_path), NGPU="2", MAX_RESTARTS="2")
    assert run.returncode == 2, run.stderr
    # On a busy machine the other rank, which waits two seconds for its end, tells its error, too.
    lines = [line for line in run.stderr.splitlines() if "local rank" not in line]
    assert sum("b.txt: not UTF-8 at byte 3" in line for line in lines) == 1
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "run").exists()
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.startswith("text-")] == []


def test_a_number_of_processes_that_is_none_is_2(tmp_path: Path, corpus: Path) -> None:
    run = launch(*tiny_arguments(tmp_path, corpus), NGPU="-1")
    assert run.returncode == 2
    said = "--nproc-per-node=-1 (NGPU of run_train.sh): expected an integer >= 1"
    assert run.stderr == f"titanlite: command line, {said}\n"


@pytest.mark.full
def test_the_worked_example_of_the_data_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files as they are printed, on part of the library and for fewer steps."""
    page = (ROOT / "docs" / "data.md").read_text()
    script, prepare, job, sums = re.findall(r"```(?:python|toml)\n(.*?)```", page, re.S)
    (tmp_path / "prepare.toml").write_text(prepare)
    (tmp_path / "train.toml").write_text(job)
    (tmp_path / "assets").symlink_to(ROOT / "assets")

    def run(*arguments: str) -> str:
        assert cli.run([*arguments]) == 0
        printed = capsys.readouterr()
        return printed.out + printed.err

    monkeypatch.chdir(tmp_path)
    shorter = script.replace('"*.py"', '"a*.py"')
    subprocess.run([sys.executable, "-c", shorter], check=True, timeout=400)
    table = run("prepare", "prepare.toml")
    for line in ("read ", "length ", "exact_duplicates ", "near_duplicates ", "kept ", "data/code: "):
        assert f"\n{line}" in table
    assert "all hashes match" in run("data", "verify", "data/code")
    assert "---- document" in run("data", "show", "data/code", "--sequence=3", "--seq_len=256")
    assert "==== training sequence 17" in run("data", "show", "train.toml", "--sequence=17")
    subprocess.run([sys.executable, "-c", sums], check=True, timeout=400)
    assert "90,000 documents" in run("data", "verify", "data/sums")
    log = run("train", "train.toml", "--training.steps=2", "--lr_scheduler.warmup_steps=1")
    assert "data/code: 100.0% of the sequences" in log
    assert "validation loss" in log
