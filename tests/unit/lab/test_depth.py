"""A gpt at another depth: the settings are nanochat's for this depth, and those of the shipped files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titanlite.config.component import ConfigError
from titanlite.config.shipped import find_config
from titanlite.job import Job, load_job
from titanlite.lab.depth import at_depth
from titanlite.tools.config import main as config_main


def shipped(name: str) -> Job:
    return load_job(str(find_config(name)), [], 1)


@pytest.mark.parametrize(
    ("depth", "steps", "tokens_per_step", "rate", "decay"),
    [  # what nanochat 92d63d4 derives with --target-param-data-ratio=12
        (8, 1920, 262_144, 0.5**0.5, 0.519682),
        (12, 2520, 524_288, 1.0, 0.28),
        (26, 10_510, 1_048_576, 2**0.5, 0.047475),
    ],
)
def test_the_settings_are_nanochats(
    depth: int, steps: int, tokens_per_step: int, rate: float, decay: float
) -> None:
    job = at_depth(shipped("gpt_d12"), depth)
    assert job.model.config.n_layers == depth
    assert job.training.steps == steps
    assert job.training.global_batch_size * job.training.seq_len == tokens_per_step
    assert job.optimizer.lr == pytest.approx(0.02 * rate, rel=1e-3)
    assert job.optimizer.weight_decay == pytest.approx(decay, rel=1e-3)
    assert job.optimizer.peak_lr("adamw") == pytest.approx(
        0.02 * rate * (job.model.config.dim / 768) ** -0.5, rel=1e-3
    )
    assert job.optimizer.schedules[0].values[-1] == [steps, 0.9]


@pytest.mark.parametrize("depth", [8, 26])
def test_the_shipped_files_have_them(depth: int) -> None:
    derived, file = at_depth(shipped("gpt_d12"), depth), shipped(f"gpt_d{depth}")
    batch = replace(derived.training, local_batch_size=file.training.local_batch_size)
    assert replace(derived, training=batch) == file


def test_another_model_and_unknown_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="whose depths are d4, d6, d8"):
        at_depth(shipped("debug"), 8)
    with pytest.raises(ConfigError, match="whose depths are d4, d6, d8"):
        at_depth(shipped("gpt_d12"), 7)
    job = load_job(str(find_config("gpt_d12")), ["--training.steps=1B tokens"], 1)
    with pytest.raises(ConfigError, match="needs a number of steps"):
        at_depth(job, 8)
    job = load_job(str(find_config("gpt_d12")), ["--optimizer.schedules=[]", "--optimizer.name=adamw",
                                                  "--optimizer.param_groups=[]"], 1)  # fmt: skip
    with pytest.raises(ConfigError, match="for muon only"):
        at_depth(job, 8)


def test_the_command_writes_a_job_that_is_valid(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from titanlite.lab import tune

    path = tmp_path / "gpt_d8.toml"
    assert tune.main(["gpt_d12", "--depth=8", f"--output={path}"]) == 0
    assert load_job(str(path), [], 1) == shipped("gpt_d8")
    assert config_main([str(path)]) == 0
    assert "gpt d8" in capsys.readouterr().out
