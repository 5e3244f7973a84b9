"""A family's auxiliary loss has the same gradient on every layout; its buffers are state, or have their value
in every run, and are never memory that nobody has written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.auxiliary import Auxiliary, Net
from tests.support.gradients import build, gradients, on_rank
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import history, run_in_hops, train_on_rank, weights_sha
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.models.decoder import RotaryConfig
from titanlite.tools.config import build_on_meta

FAMILY = {"family": "auxiliary", "tied": False}
OVERRIDES = [
    '--job.imports=["tests.support.auxiliary"]',
    '--model={name = "auxiliary", flavor = "debug"}',
]


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(actual[name], value, rtol=1e-4, atol=1e-7) for name, value in expected.items())


@pytest.mark.full
def test_the_gradient_of_an_auxiliary_loss_is_the_same_for_any_split(run_on) -> None:
    whole = gradients(1, 0, 1, **FAMILY)
    assert same(gradients(1, 0, 4, **FAMILY), whole)
    assert same(run_on(2, on_rank, 2, 2, FAMILY)[0], whole)


def test_control_a_mean_in_place_of_a_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(net: Net) -> dict[str, torch.Tensor]:
        return {name: loss / 8 for name, loss in net.losses.items()}

    monkeypatch.setattr(Net, "auxiliary_losses", mean)
    one = gradients(1, 0, 1, **FAMILY)
    monkeypatch.setattr(Net, "auxiliary_losses", lambda net: {})
    none = gradients(1, 0, 1, **FAMILY)
    monkeypatch.undo()
    assert not same(one, gradients(1, 0, 1, **FAMILY))
    assert not same(none, one)
    assert torch.equal(none["loss"], one["loss"]), "the reported loss is the main one"


def test_a_name_may_not_be_that_of_an_auxiliary_loss_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two would be missing from the metrics."""
    assert gradients(1, 0, 1, z_loss=1e-4, **FAMILY)["z_loss"] > 0  # control: other names
    monkeypatch.setattr(Net, "auxiliary_losses", lambda net: {"z_loss": net.losses["hidden_norm"]})
    with pytest.raises(ConfigError, match="loss and model both have an auxiliary loss 'z_loss'"):
        gradients(1, 0, 1, z_loss=1e-4, **FAMILY)


def errors_of_a_pipeline() -> tuple[str, str]:
    """The error for an auxiliary loss, and the error for a buffer in a module that stages do not share."""
    layout, rank = {**FAMILY, "pp": 2}, torch.distributed.get_rank()
    with pytest.raises(ConfigError) as loss:
        build(2, rank, **layout)
    init = Net.__init__

    def with_stray_buffer(net: Net, c: RotaryConfig) -> None:
        init(net, c)
        net.register_buffer("stray", torch.empty(c.dim))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Net, "__init__", with_stray_buffer)
        patch.delattr(Net, "auxiliary_losses")
        with pytest.raises(ConfigError) as buffer:
            build(2, rank, **layout)
    return str(loss.value), str(buffer.value)


@pytest.mark.full
def test_pipeline_parallel_refuses_auxiliary_losses_and_stray_buffers(run_on) -> None:
    loss, buffer = run_on(2, errors_of_a_pipeline)[0]
    assert "the model has auxiliary losses, which pipeline parallel does not support" in loss
    assert "'stray' is elsewhere" in buffer


def test_the_config_check_refuses_auxiliary_losses_under_pipeline_parallel(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, corpus, *OVERRIDES, "--parallelism.pipeline_parallel_degree=2", world_size=2)
    with pytest.raises(ConfigError, match="auxiliary losses, which pipeline parallel does not support"):
        build_on_meta(job)
    monkeypatch.delattr(Net, "auxiliary_losses")
    build_on_meta(job)


def test_a_buffer_without_a_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Net, "initial_buffer")
    with pytest.raises(ConfigError, match="gives no value for the buffer"):
        build(1, 0, **FAMILY)


def saved(job: Job, step: int) -> dict[str, torch.Tensor]:
    net = Auxiliary(flavor="debug").build()
    tensors = model_tensors(net)
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": tensors})
    return tensors


@pytest.mark.full
def test_a_run_saves_and_restores_its_buffers(run_on, tmp_path: Path, corpus: Path) -> None:
    whole = run_in_hops(tmp_path, corpus, [6], *OVERRIDES, name="whole")
    hops = run_in_hops(tmp_path, corpus, [3, 6], *OVERRIDES, name="hops")
    assert history(hops) == history(whole)
    assert weights_sha(hops, 6) == weights_sha(whole, 6)
    counts = [saved(job, 6)["counter.applied_steps"].item() for job in (whole, hops)]
    assert counts == [6, 6]
    assert "counter.scale" not in saved(whole, 6)
    losses = [line["train/hidden_norm"] for line in metrics_of(whole)]
    assert losses[-1] < losses[0]
    assert [line["model/applied_steps"] for line in metrics_of(hops)] == [1, 2, 3, 4, 5, 6]

    run_in_hops(tmp_path, corpus, [3], *OVERRIDES, name="two")
    run_on(2, train_on_rank, tmp_path, corpus, [*OVERRIDES, "--training.steps=6"], "two", 2)
    two = make_job(tmp_path, corpus, *OVERRIDES, name="two")
    assert saved(two, 6)["counter.applied_steps"].item() == 6
    for key in ("train/loss", "train/hidden_norm", "model/applied_steps"):
        wanted = [line[key] for line in metrics_of(whole)]
        assert [line[key] for line in metrics_of(two)] == pytest.approx(wanted, rel=2e-5)


def test_a_run_reports_the_z_loss_beside_its_loss(tmp_path: Path, corpus: Path) -> None:
    z_loss = "--loss.z_loss_multiplier=0.01"
    plain = run_in_hops(tmp_path, corpus, [3], name="plain")
    job = run_in_hops(tmp_path, corpus, [1, 3], z_loss, "--validation.enable", name="z_loss")
    lines, others = metrics_of(job), metrics_of(plain)
    assert lines[0]["train/loss"] == others[0]["train/loss"], "the value is that of the tokens alone"
    assert lines[2]["train/loss"] != others[2]["train/loss"], "the gradient is that of both"
    assert all(0.2 < line["train/z_loss"] < 0.5 for line in lines), "0.01 log(258)^2 is 0.31"
    assert lines[2]["eval/loss"] < lines[2]["train/loss"], "validation includes the z-loss"
    assert "train/z_loss" not in others[0]
    with pytest.raises(ConfigError, match=r"loss.z_loss_multiplier"):
        run_in_hops(tmp_path, corpus, [4], name="z_loss")
