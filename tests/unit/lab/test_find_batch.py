"""`titanlite tune --find-batch`: which sizes are trained, and real runs with a made-up GPU."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import ROOT, make_job, tiny_arguments
from titanlite import cli
from titanlite.job import load_job
from titanlite.lab import find_batch
from titanlite.lab.cards import Card
from titanlite.lab.find_batch import MAX_SHARE, MAX_STARTS, BatchTrainer, BatchTrial, find, micro_batches
from titanlite.runtime.signals import StopRequests

CARD_GIB = 100.0
PIPELINE = [
    "--parallelism.pipeline_parallel_degree=2",
    "--model.overrides.tie_word_embeddings=false",
]
RAMP = "--training.batch_ramp=[{until='8 sequences', global_batch_size=4}]"
POWERS = [2**i for i in range(8)]


def card(reserved_gib: Callable[[int], float]) -> Callable[[int], BatchTrial]:
    """Trains on a GPU of 100 GiB on which a size reserves so much; more than that is out of memory."""

    def train(size: int) -> BatchTrial:
        gib = reserved_gib(size)
        if gib > CARD_GIB:
            return BatchTrial(size, out_of_memory="out of memory in step 1, backward")
        return BatchTrial(size, 0.9 * gib, gib, 100.0 + size)

    return train


@pytest.mark.parametrize(
    ("needs", "tried", "largest"),
    [
        (lambda n: 10 + 5 * n, [8, 16, 32], 16),  # as planned; 8: to compare the speed
        (lambda n: 11 + 5.3 * n, [4, 8, 16], 8),  # 95.8 GiB for 16 are more than 95% of the GPU
        (lambda n: 10 + 6 * n, [4, 8, 16], 8),  # 16 runs out of memory
        (lambda n: 5 + 2 * n, [16, 32, 64], 32),
        (lambda n: 50 + 30 * n, [1, 2, 4, 8, 16], 1),
        (lambda n: 1.0, [16, 128], 128),
        (lambda n: 200.0, [1, 2, 4, 8, 16], None),
    ],
)
def test_the_largest_size_that_fits_is_found(
    needs: Callable[[int], float], tried: list[int], largest: int | None
) -> None:
    trials = find(POWERS, lambda n: 10 + 5 * n, CARD_GIB, card(needs))
    assert [trial.size for trial in trials] == tried
    assert max((t.size for t in trials if t.fits(CARD_GIB)), default=None) == largest


@given(st.floats(0.5, 80), st.floats(0.1, 40), st.floats(0.5, 2), st.floats(0.5, 2), st.integers(1, 200))
def test_what_fits_is_between_neighbours_or_the_starts_are_used_up(
    base: float, slope: float, base_error: float, slope_error: float, num: int
) -> None:
    sizes = list(range(1, num + 1))

    def needs(n: int) -> float:
        return base + slope * n

    trials = find(sizes, lambda n: base * base_error + slope * slope_error * n, CARD_GIB, card(needs))
    fits = [n for n in sizes if needs(n) <= MAX_SHARE * CARD_GIB]
    largest = max((t.size for t in trials if t.fits(CARD_GIB)), default=0)
    assert len({t.size for t in trials}) == len(trials)
    assert largest == max(fits, default=0) or (largest and len(trials) >= MAX_STARTS)
    if math.isclose(base_error, 1) and math.isclose(slope_error, 1):
        assert len(trials) <= 3


def made_up_trainer(
    folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, *words: str, ranks: int = 1
) -> BatchTrainer:
    """Of the tiny job, with a made-up GPU of 80 GiB."""
    monkeypatch.setattr(find_batch, "gpu", lambda: Card("GPU", 80.0, 0.0, 0.0))
    config, *rest = tiny_arguments(folder, corpus)
    options = Namespace(config=config, gpus_per_trial=ranks)
    return BatchTrainer(options, [*rest, *words], StopRequests(), folder)


def test_sizes_divide_the_global_batch(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--training.global_batch_size=24")
    assert list(micro_batches(job, 1)) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert list(micro_batches(job, 2)) == [1, 2, 3, 4, 6, 12]
    ramp = "--training.batch_ramp=[{until='8 sequences', global_batch_size=8}]"
    job = make_job(tmp_path, corpus, "--training.global_batch_size=24", ramp)
    assert list(micro_batches(job, 1)) == [1, 2, 4, 8]


def test_a_global_batch_that_follows_allows_all_sizes(tmp_path: Path, corpus: Path) -> None:
    words = ["--training.global_batch_size=-1", "--training.local_batch_size=33"]
    sizes = micro_batches(make_job(tmp_path, corpus, *words), 1)
    assert [next(sizes) for _ in range(23)] == [*range(1, 17), 18, 20, 22, 24, 26, 28, 30]
    assert [next(sizes) for _ in range(4)] == [32, 33, 36, 40]


@pytest.mark.parametrize(
    ("ranks", "words", "batch"),
    [
        (1, [], 4),  # two micro-batches of 2
        (2, [], 8),
        (2, PIPELINE, 8),  # a pipeline has all four
        (1, [RAMP], 4),
        (1, [RAMP, "--training.batch_ramp_lr=sqrt"], 4),
        (1, ["--stages=[{until='16 sequences', global_batch_size=4}, {until='end'}]"], 8),
    ],
)
def test_the_job_of_a_run_is_valid(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    words: list[str],
    batch: int,
) -> None:
    words = ["--guard.on_spike=rewind", "--validation.enable=true", *words]
    trainer = made_up_trainer(tmp_path, corpus, monkeypatch, *words, ranks=ranks)
    config, rest = trainer.config, trainer.overrides
    assert trainer.has_whole_steps(2) == (batch == trainer.planned(2).global_batch)
    job = load_job(config, [*rest, *trainer.own_overrides(2)], ranks)
    assert (job.training.local_batch_size, job.training.global_batch_size) == (2, batch)
    assert not job.training.batch_ramp
    assert not job.checkpoint.enable
    assert not job.validation.enable
    assert job.training.steps == load_job(config, rest, ranks).training.steps


@pytest.mark.parametrize(("given", "freq"), [(100, 2), (1, 2), (0, 0)])
def test_a_second_detailed_report_is_in_the_run(
    given: int, freq: int, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made_up_trainer(tmp_path, corpus, monkeypatch, f"--metrics.detail_freq={given}")
    words = [*trainer.overrides, *trainer.own_overrides(1)]
    metrics = load_job(trainer.config, words, 1).metrics
    assert metrics.detail_freq == freq
    assert metrics.detail_is_due(2, last_step=100) == (freq > 0)


@pytest.mark.parametrize(("code", "fits"), [(0, True), (75, True), (5, False)])
def test_a_run_counts_by_its_end(
    code: int, fits: bool, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has reported its third step may still run out of memory. Its peak is that of all steps."""

    def start(words: list[str], *_: object) -> subprocess.Popen[bytes]:
        folder = Path(words[-1].partition("=")[2])
        folder.mkdir()
        with (folder / "metrics.jsonl").open("w") as file:
            for step, gib in ((1, 20.0), (2, 50.0), (3, 30.0)):
                record = {"step": step, "progress/total_tokens": step}
                record |= {"memory/peak_allocated_gib": gib, "memory/peak_reserved_gib": gib + 1}
                file.write(json.dumps(record | {"throughput/tokens_per_second_per_device": step}) + "\n")
        folder.with_name(f"{folder.name}.log").write_text("titanlite: out of memory in step 4, forward.\n")
        process = subprocess.Popen(["sh", "-c", f"exit {code}"])
        process.wait()
        return process

    monkeypatch.setattr(find_batch, "start_run", start)
    trial = made_up_trainer(tmp_path, corpus, monkeypatch)(1)
    assert trial.fits(80.0) == fits
    wanted = (
        BatchTrial(1, 50.0, 51.0, 3.0)
        if fits
        else BatchTrial(1, out_of_memory="out of memory in step 4, forward")
    )
    assert repr(trial) == repr(wanted)


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        # 2 and 8 sequences: the job has 8 / 2 = 4 micro-batches, the run of it 2
        (
            {2: 100.0, 8: 101.0},
            "whether it is also the fastest is not known: the runs have at most two ",
        ),
        ({4: 100.0, 8: 101.0}, "it is also the fastest of those that fit"),
        ({2: 110.0, 8: 100.0}, "fastest that fits: --training.local_batch_size=2, 10.0% faster than"),
    ],
)
def test_the_fastest_is_named_where_the_steps_are_those_of_the_job(
    speeds: dict[int, float], said: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made_up_trainer(tmp_path, corpus, monkeypatch)
    trials = [BatchTrial(size, 1.0, 1.0, speed) for size, speed in speeds.items()]
    lines = find_batch._answer(trials, trials, list(speeds), trainer)
    assert lines[-1].startswith(said)


def test_without_a_gpu_it_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["tune", *tiny_arguments(tmp_path, corpus), "--find-batch"]) == 2
    said = "titanlite: command line, --find-batch: it measures the memory of a GPU, and there is none here\n"
    assert capsys.readouterr().err == said
    assert cli.run(["tune", *tiny_arguments(tmp_path, corpus), "--find-batch", "--coordinate-check"]) == 2
    assert "--find-batch: not together with --coordinate-check" in capsys.readouterr().err


def test_the_output_in_the_docs_is_the_recorded_one() -> None:
    recorded = json.loads((ROOT / "benchmarks/results/find_batch_h200.json").read_text())
    answer = recorded["find_batch"]["printed"].partition("result ")
    assert f"```text\n{answer[1]}{answer[2]}```\n" in (ROOT / "docs/tuning.md").read_text()
    assert recorded["whole_run"]["exit_code"] == 0
    assert recorded["whole_run"]["steps"] == 50
    assert re.search(r"^out of memory in step 2, forward +26 ", recorded["find_batch"]["printed"], re.M)
    assert recorded["double_run"]["exit_code"] == 5  # twice the answer runs out of memory


def on_small_gpu(folder: Path, corpus: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """The command as a process whose GPU is that of tests/support/small_gpu.py."""
    (folder / "tmp").mkdir()
    imports = '--job.imports=["tests.support.small_gpu"]'
    command = ["tune", *tiny_arguments(folder, corpus), "--find-batch", imports, *words]
    return subprocess.Popen(
        [sys.executable, "-m", "titanlite.cli", *command],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder / "tmp")} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_nothing_is_left(folder: Path) -> None:
    """No process of the runs, and none of their files but those named here."""
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if str(folder).encode() in command]
    assert not list((folder / "tmp").glob("titanlite-*"))
    assert {path.name for path in folder.iterdir()} <= {"tmp", "job.toml", "run_find_batch.log"}


@pytest.mark.full
def test_runs_find_the_largest_size(tmp_path: Path, corpus: Path) -> None:
    """8 sequences take 1.04 of 1 GiB, 4 take 0.52. The job has what the runs leave out."""
    job = [
        "--validation.enable=true",
        "--generation.prompts=['a']",
        "--guard.on_spike=rewind",
        "--ema.enable",
    ]
    process = on_small_gpu(tmp_path, corpus, *job, "--lr_scheduler.warmup_steps=7")
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert re.findall(r"size=(\d): training 3 steps; planned 0.0 GiB", said) == ["8", "1", "4"]
    assert "local_batch_size=8: out of memory in step 1, forward\n" in said
    assert re.search(
        r"local_batch_size=4: fits: 0.5 GiB allocated, 0.5 reserved, [\d,]+ tokens/s per GPU\n", said
    )
    assert "leave out validation, samples, checkpoints and exports" in said
    lines = printed.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["fits", "1"], ["fits", "4"], ["out", "of"]]
    step = "a step of 8 sequences on 1 GPU takes 2 micro-batches"
    assert lines[4] == f"largest that fits: --training.local_batch_size=4; {step}"
    assert lines[5].startswith(("whether it is also the fastest is not known", "fastest that fits: "))
    assert_nothing_is_left(tmp_path)


@pytest.mark.full
def test_the_rank_with_most_memory_counts(tmp_path: Path, corpus: Path) -> None:
    """6 sequences take 0.78 GiB on rank 0 and 0.98 on rank 1, which is more than 95% of its GPU."""
    words = ["--gpus-per-trial=2", "--training.global_batch_size=12", "--training.local_batch_size=1"]
    process = on_small_gpu(tmp_path, corpus, *words)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert "local_batch_size=6: reserves more than 95%: 0.9 GiB allocated, 1.0 reserved, " in said
    assert (
        "largest that fits: --training.local_batch_size=3; a step of 12 sequences on 2 GPUs takes 2 "
        in printed
    )
    assert_nothing_is_left(tmp_path)


@pytest.mark.full
def test_another_failure_ends_the_search(tmp_path: Path, corpus: Path) -> None:
    process = on_small_gpu(tmp_path, corpus, SMALL_GPU_FAILS="1")
    printed, said = process.communicate()
    assert (process.returncode, printed) == (1, "")
    log = tmp_path / "run_find_batch.log"
    wanted = "the run with training.local_batch_size=8 ended with exit code 1: ValueError: a planted fault"
    assert said.splitlines()[-1] == f"titanlite: {wanted}; log: {log}"
    assert "Traceback" in log.read_text()
    assert_nothing_is_left(tmp_path)


@pytest.mark.full
def test_a_signal_ends_the_runs(tmp_path: Path, corpus: Path) -> None:
    process = on_small_gpu(tmp_path, corpus, "--gpus-per-trial=2")
    while not any(log.stat().st_size for log in (tmp_path / "tmp").glob("*/*.log")):  # both ranks train
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 75
    assert said.endswith("titanlite: stopped; the runs have ended, and nothing is left of them\n")
    assert_nothing_is_left(tmp_path)


@pytest.mark.full
def test_a_job_that_never_fits_says_so(tmp_path: Path, corpus: Path) -> None:
    words = ["--training.local_batch_size=1", "--gpus-per-trial=2", "--training.global_batch_size=2"]
    process = on_small_gpu(tmp_path, corpus, *words, SMALL_GPU_SEQUENCE_GIB="1.2")
    printed, said = process.communicate()
    assert process.returncode == 5, said
    assert printed.splitlines()[1].startswith("out of memory in step 1, forward")
    assert (
        "titanlite: even training.local_batch_size=1 does not fit. Settings that need less memory:\n" in said
    )
    assert_nothing_is_left(tmp_path)
