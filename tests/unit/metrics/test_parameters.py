"""Pins the statistics of every parameter in one process, against the weights that a run saved: norms, update
ratios, what a skipped step reports, and a resume that keeps each step once. tests/distributed/test_details.py
has the layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_ranks import FakeRanks
from tests.support.jobs import make_job, metrics_of
from tests.support.models import Parameters
from tests.support.non_finite import bad_steps
from tests.support.runs import assert_same
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.job import Job
from titanlite.mesh import ALONE
from titanlite.metrics.parameters import ParameterReport, ParameterStatistics
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import Optimizer
from titanlite.train import train

DETAILED = "--metrics.detail_freq=1"
NORM = "model.layers.1.input_layernorm.weight"


def tables_of(job: Job) -> dict[int, dict[str, list[float | None]]]:
    """The lines of parameters.jsonl by step."""
    lines = [json.loads(line) for line in (job.folder / "parameters.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["parameters"] for line in lines}


def weights(job: Job, step: int) -> dict[str, torch.Tensor]:
    tensors = model_tensors(job.model.build())
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": tensors})
    return tensors


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """A run of six steps with a report on each, of which the third is skipped."""
    job = make_job(
        tmp_path_factory.mktemp("parameters"), corpus, DETAILED, "--training.steps=6",
        "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", "--metrics.sinks=[{name = 'tensorboard'}]",
        f"--optimizer.param_groups=[{{pattern = '{NORM}', lr_multiplier = 0.0}}]",
    )  # fmt: skip
    with bad_steps({3}):
        train(job)
    return job


def test_norms_and_ratios_are_those_of_the_saved_weights(job: Job) -> None:
    tables = tables_of(job)
    for step in (2, 5, 6):
        before, after = weights(job, step - 1), weights(job, step)
        assert tables[step].keys() == after.keys()
        for name, (_, weight_norm, ratio) in tables[step].items():
            assert weight_norm == pytest.approx(after[name].double().norm().item(), rel=1e-5)
            update = (after[name].double() - before[name].double()).norm().item()
            assert ratio == pytest.approx(update / weight_norm, rel=1e-3, abs=1e-9), name


def test_the_metrics_are_extremes_of_the_table(job: Job) -> None:
    for line in metrics_of(job):
        table = tables_of(job)[line["step"]]
        if line["step"] == 3:
            continue
        norms = {name: numbers[0] for name, numbers in table.items()}
        assert math.hypot(*norms.values()) == pytest.approx(line["train/grad_norm"], rel=1e-5)
        assert line["norms/grad_max"] == norms[line["norms/grad_max_name"]] == max(norms.values())
        assert line["norms/weight"] == pytest.approx(math.hypot(*(row[1] for row in table.values())))
        ratios = sorted((numbers[2], name) for name, numbers in table.items())
        assert (line["norms/update_ratio_min"], line["norms/update_ratio_min_name"]) == ratios[0] == (0, NORM)
        assert (line["norms/update_ratio_max"], line["norms/update_ratio_max_name"]) == ratios[-1]
        middle = (ratios[len(ratios) // 2][0] + ratios[(len(ratios) - 1) // 2][0]) / 2
        assert line["norms/update_ratio_median"] == pytest.approx(middle)


def test_a_skipped_step_has_no_update_and_names_the_gradient_that_is_not_finite(job: Job) -> None:
    line, table = metrics_of(job)[2], tables_of(job)[3]
    assert {numbers[2] for numbers in table.values()} == {None}
    assert not any(key.startswith("norms/update") for key in line)
    assert line["norms/grad_max"] == "nan"
    assert [name for name, numbers in table.items() if numbers[0] == "nan"] == [line["norms/grad_max_name"]]


def test_the_noise_scale_follows_from_its_signal_and_noise(job: Job) -> None:
    first, *others = metrics_of(job)
    assert not any("noise_scale" in key for key in first), "one step tells nothing"
    for line in others:
        signal, noise = line["train/noise_scale_signal"], line["train/noise_scale_noise"]
        positive = signal > 0 and noise > 0
        assert line.get("train/noise_scale_sequences") == (
            pytest.approx(8 * noise / signal) if positive else None
        )
    assert any("train/noise_scale_sequences" in line for line in others)


@pytest.mark.full
def test_a_resume_writes_each_step_once(tmp_path: Path, corpus: Path, job: Job) -> None:
    for steps in (5, 6):
        keys = ("--checkpoint.interval=3", f"--training.steps={steps}")
        resumed = make_job(tmp_path, corpus, DETAILED, *keys)
        if steps == 6:  # as if the run had been killed after step 5
            (resumed.folder / "checkpoint/step-5").rename(tmp_path / "step-5")
        train(resumed)
    whole = make_job(tmp_path, corpus, DETAILED, "--training.steps=6", name="whole")
    train(whole)
    assert list(tables_of(resumed)) == [1, 2, 3, 4, 5, 6]
    assert tables_of(resumed) == tables_of(whole)
    assert (resumed.folder / "parameters.superseded.jsonl").read_text().count("\n") == 2


def test_an_optimizer_that_does_not_tell_has_norms_only(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("update_of", "signal_and_noise"):
        monkeypatch.setattr(AdamW, name, getattr(Optimizer, name))
    job = make_job(tmp_path, corpus, DETAILED, "--training.steps=2")
    train(job)
    line = metrics_of(job)[1]
    assert {key for key in line if key.startswith("norms/") or "noise" in key} == {
        "norms/grad_max", "norms/grad_max_name", "norms/weight",
    }  # fmt: skip
    assert {numbers[2] for numbers in tables_of(job)[2].values()} == {None}


def test_details_change_no_number_and_may_be_left_out(tmp_path: Path, corpus: Path) -> None:
    detailed = make_job(tmp_path, corpus, DETAILED, "--training.steps=2", name="detailed")
    job = make_job(tmp_path, corpus, "--metrics.detail_freq=0", "--training.steps=2")
    train(detailed)
    train(job)
    assert_same(job, detailed)
    assert not (job.folder / "parameters.jsonl").exists()
    assert not any(key.startswith("norms/") for line in metrics_of(job) for key in line)


def test_a_parameter_may_be_a_scalar_and_another_may_lack_a_gradient() -> None:
    shapes: dict[str, tuple[int, ...]] = {"weight": (40, 30), "scale": (), "unused": (3,)}
    params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    config = AdamW(lr=0.1)
    optimizer = config.build(Parameters(params), ALONE)
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in params.items()}
        params["weight"].grad, params["scale"].grad = torch.randn(40, 30), torch.tensor(0.5)
        optimizer.step()
    optimizer.state[params["weight"]]["calls"] = 2  # allowed in a run without checkpoints
    report = ParameterStatistics(Parameters(params), optimizer, config, FakeRanks()).measure(
        {"weight": 2.0, "scale": 0.5}, applied=True
    )
    assert report.names == list(shapes)
    assert report.grad_norms == [2.0, 0.5, 0.0]
    for name, weight_norm, ratio in zip(report.names, report.weight_norms, report.update_ratios):
        after = params[name].detach()
        assert weight_norm == pytest.approx(after.norm().item())
        wanted = pytest.approx(((after - before[name]).norm() / after.norm()).item(), rel=1e-3)
        assert ratio == (None if name == "unused" else wanted)
    assert report.signal is None, "the state of one parameter does not tell"


def test_a_weight_of_zero_has_no_ratio() -> None:
    report = ParameterReport(["a", "b"], [1.0, 2.0], [0.0, 3.0], [None, 0.5], signal=1.0, noise=-1.0)
    values: dict[str, Any] = report.metrics(sequences_per_step=8)
    assert values["norms/update_ratio_min_name"] == values["norms/update_ratio_max_name"] == "b"
    assert "train/noise_scale_sequences" not in values  # not from a negative estimate
    assert values["train/noise_scale_noise"] == -1.0
