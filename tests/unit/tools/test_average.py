"""Pins `titanlite checkpoint average`: the average of a run's checkpoints is a checkpoint that all verbs read
and a run starts from, but no run resumes from; and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import flip_a_shard
from tests.support.jobs import make_job
from tests.support.runs import FOUR_MICRO_BATCHES, TP, train_on_rank
from titanlite import cli
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.tools.average import _check_learning_rates
from titanlite.train import train

CONSTANT = "--lr_scheduler.decay_ratio=0"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """A run with checkpoints of the steps 2, 4 and 6, at one learning rate."""
    folder = tmp_path_factory.mktemp("run")
    job = make_job(folder, corpus, CONSTANT, "--training.steps=6", "--checkpoint.interval=2")
    train(job)
    return job


@pytest.fixture(scope="module")
def average(job: Job) -> Path:
    target = job.folder.parent / "average"
    assert cli.run(["checkpoint", "average", str(job.folder), "--last=2", "-o", str(target)]) == 0
    return target


def weights_of(job: Job, path: Path) -> dict[str, torch.Tensor]:
    net = job.model.build()
    load_tensors(path, {"model": model_tensors(net)})
    return {name: tensor.clone() for name, tensor in model_tensors(net).items()}


def averaged(job: Job, coefficients: dict[int, float]) -> dict[str, torch.Tensor]:
    """The average by hand, from loaded checkpoints by step."""
    values = {step: weights_of(job, job.folder / f"checkpoint/step-{step}") for step in coefficients}
    return {
        name: sum((c * values[step][name].double() for step, c in coefficients.items()), torch.zeros(()))
        for name in values[min(values)]
    }


def assert_equal(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == exact.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.double(), exact[name], rtol=2**-24 * (1 + 1e-6), atol=0)


def output(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> list[str]:
    """What a verb prints; for an error, its one line."""
    capsys.readouterr()
    exit_code = cli.run([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert exit_code == code, (out, err)
    lines = (err if code else out).splitlines()
    assert not code or len(lines) == 1, err
    return lines


def test_the_average_is_a_checkpoint(job: Job, average: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_equal(weights_of(job, average), averaged(job, {4: 0.5, 6: 0.5}))
    with pytest.raises(AssertionError):
        assert_equal(weights_of(job, average), averaged(job, {4: 0.6, 6: 0.4}))
    (line,) = output(capsys, "checkpoint", "verify", average)
    assert line.startswith(f"{average}: good, 4 files")
    text = "\n".join(output(capsys, "checkpoint", "show", average))
    for key, value in (("folder", "run/checkpoint"), ("steps", "4, 6"), ("weights", "0.5000, 0.5000")):
        assert re.search(rf"^  averaged_from\.{key} +{value}$", text, re.M), text
    assert "optimizer: " not in text
    assert "averaged_from" not in "\n".join(output(capsys, "checkpoint", "show", job.folder))
    assert len(output(capsys, "generate", average, "--prompt=a", "--max-new-tokens=3", "--temperature=0"))


def test_steps_and_weights(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "average"
    words = ("--steps=6,2", "--weights=linear", "-o", target)
    (line,) = output(capsys, "checkpoint", "average", job.folder, *words)
    assert line == f"{target}: steps 2, 6 of {job.folder}/checkpoint, linear weights, 0.1 MiB"
    assert_equal(weights_of(job, target), averaged(job, {2: 1 / 3, 6: 2 / 3}))


def test_it_exports(job: Job, average: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "export", average, tmp_path / "hf", "--dtype=float32", "--keep-padding")
    ours, exported = weights_of(job, average), load_file(tmp_path / "hf/model.safetensors")
    assert ours.keys() == exported.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in exported.items())


def test_a_run_starts_from_it(job: Job, average: Path, tmp_path: Path, corpus: Path) -> None:
    still = ["--training.steps=1", "--optimizer.lr=1e-30", CONSTANT]  # the first step changes no weight
    started = make_job(tmp_path, corpus, *still, f"--checkpoint.initial_load_path={average}")
    train(started)
    ours = weights_of(job, average)
    for name, tensor in weights_of(job, started.folder / "checkpoint/step-1").items():
        assert torch.equal(tensor, ours[name])


def test_no_run_resumes_from_it(average: Path, tmp_path: Path, corpus: Path) -> None:
    copied = tmp_path / "run/checkpoint/step-6"
    shutil.copytree(average, copied)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for options in ([], ["--checkpoint.load_step=6"]):
        with pytest.raises(ConfigError) as error:
            train(make_job(tmp_path, corpus, *options))
        assert error.value.key == "job.dump_folder"
        assert str(error.value) == (
            f"{copied} is an average of checkpoints, without optimizer state: no run can resume from it. "
            f"Move it out of {copied.parent}, and start a new run from it with --checkpoint.initial_load_path"
        )
    assert {*before, "job.toml"} >= {path.name for path in tmp_path.rglob("*")} - {"LOCK"}
    for options in ([], ["--checkpoint.restart=true"]):
        files = sorted(average.iterdir())
        with pytest.raises(
            ConfigError, match=f"^{average} is a checkpoint, not the folder of a run; to start"
        ):
            train(make_job(average.parent, corpus, *options, name="average"))
        assert sorted(average.iterdir()) == files


# ---- refusals


def test_damage_is_found(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(job.folder, tmp_path / "run")
    flip_a_shard(tmp_path / "run/checkpoint/step-4")
    words = ["checkpoint", "average", tmp_path / "run", "-o", tmp_path / "average"]
    (line,) = output(capsys, *words, "--last=2", code=3)
    assert re.search(r"step-4 is damaged: __0_\d.distcp is not what was written: its SHA-256 differs", line)
    (tmp_path / "run/checkpoint/step-6/train.json").unlink()
    (line,) = output(capsys, *words, "--last=2", code=3)
    before = tmp_path / "run/checkpoint/step-4"
    assert line.endswith(f"step-6 is damaged: train.json is missing; the checkpoint before it is {before}")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "NEW"], "give --last=N, or --steps=A,B,...; see `titanlite checkpoint --help`"),
        (["-o", "NEW", "--last=2", "--steps=2,4"], "give --last=N, or --steps=A,B,...; see "),
        (["-o", "NEW", "--last=4"], "--last=4, but there are 3 checkpoints: RUN has 2, 4, 6"),
        (["-o", "NEW", "--last=1"], "an average needs at least two checkpoints"),
        (["-o", "NEW", "--last=-1"], "an average needs at least two checkpoints"),
        (["-o", "NEW", "--steps=4,4"], "an average needs at least two checkpoints"),
        (["-o", "NEW", "--steps=2,3"], "no checkpoint of step 3: RUN has 2, 4, 6"),
        (["-o", "NEW", "--steps=x"], "argument --steps: 'x' is not a list of steps such as 100,200,300; "),
        (["-o", "NEW", "--last=2", "--weight=x"], "unknown option '--weight'; did you mean '--weights'?"),
        (["-o", "NEW", "--last=2", "--weights=x"], "argument --weights: invalid choice: 'x'"),
        (["--last=2"], "the following arguments are required: -o/--output"),
        (["-o", "RUN", "--last=2"], "RUN exists; choose another, or delete it"),
        (["-o", "NEW/step-9", "--last=2"], "NEW/step-9: runs name their own checkpoints step-N; choose "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    def filled(text: str) -> str:
        return text.replace("RUN", str(job.folder)).replace("NEW", str(tmp_path / "new"))

    (line,) = output(capsys, "checkpoint", "average", job.folder, *map(filled, words), code=2)
    assert line.removeprefix("titanlite: ").removeprefix("--output: ").startswith(filled(message))
    assert list(tmp_path.iterdir()) == []


def after(steps: list[int]) -> list[dict[str, Any]]:
    """The train.json of checkpoints, as far as it is read."""
    guard = {"sequences": [[1, 0, 16]]}
    return [{"step": step, "global_batch_size": 16, "guard": guard} for step in steps]


def test_a_learning_rate_that_changes_is_refused(tmp_path: Path, corpus: Path) -> None:
    """The schedule of each checkpoint is that of its own job."""
    decaying = make_job(tmp_path, corpus, "--lr_scheduler.total_steps=100", "--optimizer.lr=1e-3")
    steady = make_job(tmp_path, corpus, CONSTANT, "--optimizer.lr=1e-3")
    _check_learning_rates([decaying] * 3, after([10, 14, 18]))  # 0.93, 0.89 and 0.85 of the peak
    _check_learning_rates([steady] * 2, after([2, 8]))
    with pytest.raises(ConfigError) as error:
        _check_learning_rates([decaying] * 3, after([10, 14, 30]))
    assert str(error.value) == (
        "the learning rate is 0.0009286 at step 10 and 0.0007245 at step 30: an average needs checkpoints of "
        "one learning rate. Choose other --steps, or pass --allow-decayed"
    )
    with pytest.raises(ConfigError, match=r"is 0.001 at step 8 and 0.0005 at step 1:"):
        _check_learning_rates([steady] * 2, after([1, 8]))  # warmup
    with pytest.raises(ConfigError, match=r"is 0.001 at step 4 and 0.0005102 at step 51"):
        _check_learning_rates([steady, decaying], after([4, 51]))


def test_the_learning_rate_is_that_of_the_stage_of_the_steps_first_sequence(
    tmp_path: Path, corpus: Path
) -> None:
    """Step 4 begins with sequence 48, before the decay, and ends with sequence 63, in it."""
    low = '--stages=[{ until = "50 sequences" }, { until = "end", lr_factor = 0.1 }]'
    job = make_job(tmp_path, corpus, CONSTANT, "--lr_scheduler.warmup_steps=0", low)
    _check_learning_rates([job] * 2, after([2, 4]))
    with pytest.raises(ConfigError, match=r"at step 4 and .* at step 5:"):
        _check_learning_rates([job] * 2, after([4, 5]))


def test_a_decayed_run_needs_permission(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decayed = make_job(
        tmp_path, corpus, "--training.steps=4", "--lr_scheduler.total_steps=6", "--checkpoint.interval=2"
    )
    train(decayed)
    words = ["checkpoint", "average", decayed.folder, "--last=2", "-o", tmp_path / "average"]
    (line,) = output(capsys, *words, code=2)
    assert line.startswith("titanlite: the learning rate is ")
    assert not (tmp_path / "average").exists()
    output(capsys, *words, "--allow-decayed")
    assert_equal(weights_of(decayed, tmp_path / "average"), averaged(decayed, {2: 0.5, 4: 0.5}))


# ---- layouts


@pytest.mark.full
def test_checkpoints_of_several_layouts(
    tmp_path: Path, corpus: Path, run_on: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of one process, one of FSDP x TP, one of FSDP on two ranks, and averages kept by [ema]."""
    keys = [CONSTANT, "--checkpoint.interval=2", "--ema.enable=true"]
    for steps, ranks, layout in ((2, 1, []), (4, 4, [TP, FOUR_MICRO_BATCHES]), (6, 2, [])):
        run_on(
            ranks,
            train_on_rank,
            tmp_path,
            corpus,
            [*keys, f"--training.steps={steps}", *layout],
            "run",
            ranks,
        )
    job = make_job(tmp_path, corpus)
    target = tmp_path / "average"
    output(capsys, "checkpoint", "average", job.folder, "--last=3", "--weights=linear", "-o", target)
    assert_equal(weights_of(job, target), averaged(job, {2: 1 / 6, 4: 2 / 6, 6: 3 / 6}))
    text = "\n".join(output(capsys, "checkpoint", "show", target))
    assert re.search("^model: 20 tensors", text, re.M)
    assert "ema: " not in text
    assert json.loads((target / "train.json").read_text())["averaged_from"]["steps"] == [2, 4, 6]
