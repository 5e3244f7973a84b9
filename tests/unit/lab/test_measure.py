"""`titanlite tune --measure` measures this machine, with one and with several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titanlite import cli
from titanlite.lab import measure, step_timer
from titanlite.lab.calibration import read_measurement

TINY = ["--model.overrides.dim=32", "--model.overrides.hidden_dim=64", "--model.overrides.vocab_size=512"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timer, "ROUND_S", 0.0)
    monkeypatch.setattr(measure, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(measure, "PRODUCT_SIZE", {"cpu": 64})


@pytest.mark.full
def test_a_measurement_is_written_and_taken_by_the_plan(tmp_path: Path, quick: None, capsys: Capture) -> None:
    file = tmp_path / "measured.json"
    assert cli.run(["tune", "debug", "--measure", f"--output={file}", *TINY]) == 0
    text = capsys.readouterr().out
    assert "one block, forward and backward" in text
    assert "step on 1 x CPU" in text
    assert f"written: {file}" in text
    measured = read_measurement(file)
    assert measured.card.is_cpu
    assert all(seconds > 0 for seconds in measured.measured[:3])
    assert measured.measured.link is None
    assert all(factor > 0 for factor in measured.speeds)
    assert cli.run(["plan", "debug", *TINY, f"--measured={file}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["gpu"] == "CPU"
    assert plan["time"]["guess"] == []
    parts = measured.measured
    blocks_and_head = 8 * (parts.head + 4 * parts.block)  # 8 micro-batches, 4 blocks
    assert plan["time"]["step_s"] == pytest.approx(blocks_and_head + parts.optimizer)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.enable_cpu_offload"], "--training.enable_cpu_offload: --measure does not measure"),
        (["--coordinate-check"], "not together with --coordinate-check"),
        (["--gpus-per-trial=0"], "--gpus-per-trial: 0 is below 1"),
        (["--output=no/such/folder.json"], "there is no such folder"),
        (["--model.overrides.vocab_size=2000000000"], "two blocks need "),
        (["--optimizer.lr=1e-4:1e-3:3"], "--optimizer.lr: several values are for a search"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    words: list[str], message: str, tmp_path: Path, quick: None, capsys: Capture
) -> None:
    assert cli.run(["tune", "debug", "--measure", f"--output={tmp_path / 'x.json'}", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "measuring" not in line]
    assert message in line


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            5,
            "while measuring; lower --training.local_batch_size\n",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 5, "Triton Error [CUDA]: out of memory\n"),
        (RuntimeError("another one"), 1, "RuntimeError: another one\n"),
    ],
)
def test_running_out_of_memory_has_its_exit_code(
    error: RuntimeError,
    code: int,
    said: str,
    tmp_path: Path,
    quick: None,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_steps(*_: object) -> None:
        raise error

    monkeypatch.setattr(measure, "time_steps", time_steps)
    assert cli.run(["tune", "debug", "--measure", f"--output={tmp_path / 'x.json'}", *TINY]) == code
    assert said in capsys.readouterr().err


@pytest.mark.full
def test_several_ranks_measure_the_collectives(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    words = ["tune", "debug", "--measure", "--gpus-per-trial=2", f"--output={file}", *TINY]
    done = subprocess.run([sys.executable, "-m", "titanlite.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step on 2 x CPU") == 1  # rank 0 prints
    measured = read_measurement(file)
    assert measured.num_ranks == 2
    assert measured.measured.link is not None
    assert measured.measured.link > 0
