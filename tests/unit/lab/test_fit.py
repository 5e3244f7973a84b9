"""`titanlite plan --fit`: the law of run folders and its forecasts, and the runs that it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import BASE, ROOT, tiny_arguments
from titanlite import cli, train
from titanlite.job import load_job
from titanlite.lab import scaling_law

Capture = pytest.CaptureFixture[str]
DIMS, STEPS = (16, 32, 64), (2000, 8000, 32000)
BATCH = 8 * 32  # tokens per step
LAW = 1.7, 35.0, 0.4, 300.0, 0.45  # E, A, alpha, B, beta
IDENTITY: dict[str, Any] = {
    "data": {"tokenizer": "bytes-1", "sources": {"ab": 1000}, "packing": "chunk", "mask_documents": False}
}


def loss_at(parameters: float, tokens: float) -> float:
    E, A, alpha, B, beta = LAW
    return E + A / parameters**alpha + B / tokens**beta


def write_run(folder: Path, dim: int, steps: int, noise: float = 0.0) -> Path:
    """The folder of a run that has ended at the law's loss."""
    folder.mkdir(parents=True)
    text = BASE.replace("dim = 32", f"dim = {dim}", 1).replace("total_steps = 16", "total_steps = 0")
    text = text.replace("steps = 8\n", f"steps = {steps}\n")
    (folder / "job.toml").write_text(text)
    net = load_job(folder / "job.toml", world_size=None).build_on_meta()
    loss = loss_at(net.num_matmul_parameters(), steps * BATCH) * (1 + noise)
    records = [record(1, 3e-3), record(steps // 2, 2e-3) | {"eval/loss": 2 * loss}]
    records.append(record(steps, 1e-5) | {"eval/loss": loss, "eval/tokens": 320})
    write_records(folder, records)
    (folder / "run_identity.json").write_text(json.dumps(IDENTITY))
    source = {"source": "text", "share": 1.0, "sequences": 1_000_000}
    (folder / "sources.json").write_text(json.dumps({"sources": [source]}))
    return folder


def record(step: int, rate: float) -> dict[str, Any]:
    counts = {"progress/total_tokens": step * BATCH, "progress/sequences": step * 8}
    return {"step": step, "train/loss": 3.0, "train/learning_rate": rate, **counts}


def write_records(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in records))


def change_last(folder: Path, **values: Any) -> None:
    """Change values of the last record; None leaves one out."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    *before, last = [json.loads(line) for line in lines]
    last = {key: value for key, value in (last | values).items() if value is not None}
    write_records(folder, [*before, last])


def change_file(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


@pytest.fixture(autouse=True)
def few_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save time."""
    monkeypatch.setattr(scaling_law, "fit", partial(scaling_law.fit, num_replicas=200))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("law")
    for dim in DIMS:
        for steps in STEPS:
            write_run(folder / f"{dim}-{steps}", dim, steps, 1e-4 * rng.standard_normal())
    return folder


@pytest.fixture
def runs(tmp_path: Path, written: Path) -> Path:
    """A folder of nine runs."""
    return Path(shutil.copytree(written, tmp_path / "runs"))


def fitted(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.run([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_law_of_run_folders(capsys: Capture, runs: Path) -> None:
    law = fitted(capsys, "plan", "--fit", str(runs), "--flops=1e15")
    assert len(law["runs"]) == 9
    by_name = {run["name"]: run for run in law["runs"]}
    assert by_name["32-8000"]["tokens"] == 8000 * BATCH
    # Two blocks of q, k, v, o (q and o: 32 x 32; k and v: 32 x 16) and three matrices of 32 x 64, five norms,
    # and a head of 258 x 32 that is the embedding, too.
    assert (
        by_name["32-8000"]["parameters"] == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 5 * 32 + 258 * 32
    )
    for name, true in zip(("E", "A", "alpha", "B", "beta"), LAW):
        constant = law["constants"][name]
        assert constant["low"] <= true <= constant["high"]
    assert law["noise"] == pytest.approx(1e-4, rel=0.6)
    assert law["forecast"] is None
    best = law["optimum"]
    n, d = best["parameters"]["value"], best["tokens"]["value"]
    assert 6 * n * d == pytest.approx(1e15)
    assert loss_at(n, d) == pytest.approx(
        min(loss_at(n * f, d / f) for f in np.geomspace(0.5, 2, 101)), abs=1e-3
    )
    again = fitted(capsys, "plan", "--fit", *map(str, sorted(runs.iterdir())), f"--tokens={d:.0f}")
    assert again["optimum"]["flops"] == pytest.approx(1e15, rel=0.01)
    assert again["constants"] == law["constants"]


@pytest.mark.full
def test_a_job_is_forecast(capsys: Capture, runs: Path) -> None:
    held_out = write_run(runs.parent / "large", 128, 64000)
    job = str(held_out / "job.toml")
    plan = fitted(capsys, "plan", job, "--fit", str(runs))
    forecast = plan["law"]["forecast"]
    assert forecast["tokens"] == 64000 * BATCH
    assert forecast["parameters"] == plan["model"]["matmul_parameters"]
    true = loss_at(forecast["parameters"], forecast["tokens"])
    assert forecast["loss"]["low"] < true < forecast["loss"]["high"]
    assert forecast["loss"]["high"] - forecast["loss"]["low"] < 0.02
    assert forecast["extrapolation"]["tokens"] == pytest.approx(2)
    assert plan["optimum"] is None  # the law of others' data
    assert cli.run(["plan", job, "--fit", str(runs)]) == 0
    text = capsys.readouterr().out
    assert "forecast for this job" in text
    assert "the forecast is for the data of the runs; the data " in text
    assert "Besiroglu" not in text
    assert "], with the noise of a run, at " in text
    assert "has no term for that" not in text  # control
    double = ["--training.global_batch_size=16", "--training.steps=32000"]
    assert cli.run(["plan", job, *double, "--fit", str(runs)]) == 0
    note = "note: a step has 256 to 512 tokens in these runs and this job; the law has no term for that"
    assert note in capsys.readouterr().out
    assert cli.run(["plan", job]) == 0
    assert "Besiroglu" in capsys.readouterr().out  # control


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "unfinished": (
        lambda folder: change_file(folder, "job.toml", "steps = 8000", "steps = 9000"),
        "it has not ended: it is at step 8000 of 9000",
    ),
    "fewer steps than taken": (
        lambda folder: change_file(folder, "job.toml", "steps = 8000", "steps = 7000"),
        "it took 8000 steps, but its job.toml has training.steps = 7000: correct it",
    ),
    "no validation": (
        lambda folder: change_last(folder, **{"eval/loss": None}),
        "it has no eval/loss after its last step",
    ),
    "not finite": (
        lambda folder: change_last(folder, **{"eval/loss": "nan"}),
        "it has no eval/loss after its last step",
    ),
    "not decayed": (
        lambda folder: change_last(folder, **{"train/learning_rate": 1e-3}),
        "its learning rate ends at 33% of the peak: the law is of losses after a decay",
    ),
    "another end": (
        lambda folder: change_last(folder, **{"train/learning_rate": 3e-4}),
        "its learning rate ends at 10% of the peak, that of 16-2000 at 0%",
    ),
    "another tokenizer": (
        lambda folder: change_file(folder, "run_identity.json", "bytes-1", "bytes-2"),
        'data.tokenizer is "bytes-2", but "bytes-1" in 16-2000',
    ),
    "other data": (
        lambda folder: change_file(folder, "run_identity.json", '"ab"', '"ac"'),
        "the content or the weights of data.sources are not those of 16-2000",
    ),
    "another validation": (
        lambda folder: change_last(folder, **{"eval/tokens": 640}),
        "eval/tokens is 640, but 320 in 16-2000",
    ),
    "another optimizer": (
        lambda folder: change_file(folder, "job.toml", '"adamw"', '"muon"'),
        'optimizer.name is "muon", but "adamw" in 16-2000',
    ),
    "repeated data": (
        lambda folder: change_file(folder, "sources.json", "1000000", "10000"),
        "it read text 6.4 times: from 4 epochs on",
    ),
    "unknown epochs": (lambda folder: (folder / "sources.json").unlink(), "its epochs are not known"),
    "other weights": (
        lambda folder: change_file(folder, "job.toml", "interval = 4", 'initial_load_path = "base"'),
        "it has checkpoint.initial_load_path; the law is of runs from scratch",
    ),
    "damaged": (
        lambda folder: (folder / "run_identity.json").write_text("{}"),
        "cannot be read: data is missing",
    ),
    "no metrics": (lambda folder: (folder / "metrics.jsonl").unlink(), "not a run folder with metrics"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_cannot_be_used_is_refused_by_name(capsys: Capture, runs: Path, name: str) -> None:
    spoil, message = BAD[name]
    spoil(runs / "32-8000")
    assert cli.run(["plan", "--fit", str(runs / "16-2000"), str(runs / "32-8000")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("titanlite: 32-8000: ")
    assert message in error
    assert error.count("\n") == 1


def test_every_run_that_cannot_be_used_has_a_line(capsys: Capture, runs: Path) -> None:
    change_last(runs / "16-2000", **{"eval/loss": None})
    change_last(runs / "64-8000", **{"train/learning_rate": 3e-3})
    assert cli.run(["plan", "--fit", str(runs)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["16-2000", "64-8000"]


def test_a_search_is_refused(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text("{}")
    assert cli.run(["plan", "--fit", str(tmp_path)]) == 2
    assert "is a search, whose runs differ in more than size and length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[13]*-*", "--fit: 6 runs; a law of five constants needs at least 8"),
        ("none*", "is neither a run folder nor a folder with run folders"),
    ],
)
def test_too_few_runs_are_refused(capsys: Capture, runs: Path, pattern: str, message: str) -> None:
    folders = [str(folder) for folder in runs.glob(pattern)] or [str(runs / "none")]
    assert cli.run(["plan", "--fit", *folders]) == 2
    assert message in capsys.readouterr().err


def test_runs_at_one_number_of_tokens_per_parameter_are_refused(capsys: Capture, tmp_path: Path) -> None:
    for i in range(8):
        dim = 16 + 8 * i
        job = load_job(write_run(tmp_path / f"size-{i}", dim, 64) / "job.toml", world_size=None)
        steps = 20 * job.build_on_meta().num_matmul_parameters() // BATCH
        write_run(tmp_path / "runs" / f"{i}", dim, steps)
    assert cli.run(["plan", "--fit", str(tmp_path / "runs")]) == 2
    assert "the tokens per parameter of the runs are between " in capsys.readouterr().err


@pytest.mark.full
def test_what_the_runs_do_not_tell_is_refused(capsys: Capture, tmp_path: Path, runs: Path) -> None:
    """A run of far more FLOPs, and jobs that the law is not of."""
    large = str(write_run(tmp_path / "large", 128, 64000) / "job.toml")
    for words, message in [
        (["--flops=1e30"], "1e+30 FLOPs are 3.79e+17 times those of the largest run"),
        (["--optimizer.name=muon"], 'optimizer.name is "muon", but "adamw" in '),
        (["--lr_scheduler.decay_ratio=0"], "lr_scheduler: the learning rate ends at 100% of the peak"),
        (["--checkpoint.initial_load_path=base"], "the law is of runs from scratch"),
        ([], ""),
    ]:
        assert cli.run(["plan", large, *words, "--fit", str(runs)]) == (2 if message else 0)
        assert message in capsys.readouterr().err
    rng = np.random.default_rng(0)
    for folder in sorted(runs.iterdir()):
        loss = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["eval/loss"]
        change_last(folder, **{"eval/loss": loss * (1 + 0.006 * rng.standard_normal())})
    far = str(write_run(tmp_path / "far", 256, 1_000_000) / "job.toml")
    assert cli.run(["plan", far, "--fit", str(runs)]) == 2
    assert "the loss of this job is not known: 95% of the bootstrap" in capsys.readouterr().err
    assert cli.run(["plan", "--fit", str(runs), "--flops=1e15"]) == 2
    unknown = "the compute-optimal number of parameters for "
    assert f"{unknown}1e+15 FLOPs is not known" in capsys.readouterr().err
    law = fitted(capsys, "plan", large, "--fit", str(runs))["law"]  # asked for the loss only
    assert law["forecast"]["loss"]["value"] > 0
    assert law["optimum"] is None
    assert law["optimum_unknown"].startswith(unknown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama3_8b", "--flops=1e21"], "--flops: it needs the runs of a law; see --fit"),
        (["--fit", "runs", "--gpus=8xH100"], "--gpus needs a CONFIG, which comes first"),
        (["--fit", "runs", "--training.steps=8"], "--training.steps=8 needs a CONFIG, which comes first"),
        (["--fit", "runs", "--flops=many"], "'many' is not a number of FLOPs such as 1e21"),
        (
            ["--fit", "runs", "--flops=1e31"],
            "'1e31' is not a number of FLOPs such as 1e21; the largest is 1e+30",
        ),
        (["--fit", "there/is/none"], "there/is/none is neither a run folder"),
        (["--fit"], "expected at least one argument"),
    ],
)
def test_mistakes_are_one_line(capsys: Capture, words: list[str], message: str) -> None:
    assert cli.run(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_output_in_the_docs_is_the_recorded_one() -> None:
    recorded = (ROOT / "benchmarks/results/scaling_debug_2_cores.txt").read_text().partition("\n")[2]
    assert f"```text\n{recorded}```\n" in (ROOT / "docs/planning.md").read_text()


@pytest.mark.full
def test_real_runs_are_read(capsys: Capture, tmp_path: Path, corpus: Path) -> None:
    """A run counts, and is too few; with a schedule that is longer than the run it does not count."""
    for name, total_steps in (("decayed", 0), ("cut", 16)):
        words = [f"--lr_scheduler.total_steps={total_steps}", "--lr_scheduler.warmup_steps=0"]
        assert train.main([*tiny_arguments(tmp_path, corpus, name), *words, "--validation.enable=true"]) == 0
    capsys.readouterr()
    for name, message in (("decayed", "--fit: 1 runs; "), ("cut", "cut: its learning rate ends at 5")):
        assert cli.run(["plan", "--fit", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith(f"titanlite: {message}")
