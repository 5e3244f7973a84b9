"""A gpt at another depth: the settings are nanochat's for this depth, and those of the shipped files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.config.component import ConfigError
from titanlite.config.shipped import find_config
from titanlite.job import Job, load_job
from titanlite.lab import tune
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
    width = (job.model.config.dim / 768) ** -0.5
    rates = {  # by the beginning of the name, within a block for the parts of blocks
        "lm_head": 0.008 * rate * width, "model.embed_tokens": 0.3 * rate * width, "model.smear": 0.2,
        "model.backout": 0.2, "self_attn.value_embedding": 0.15 * rate * width,
        "residual_mix.residual": 0.005 * rate, "residual_mix.embedding": 0.5 * rate,
        "self_attn": 0.02 * rate, "mlp": 0.02 * rate,
    }  # fmt: skip
    for settings, names in job.optimizer.grouped(job.model.build_on_meta()).items():
        for name in names:
            within = re.sub(r"model\.layers\.\d+\.", "", name)
            wanted = next(value for start, value in rates.items() if within.startswith(start))
            assert settings.peak_lr == pytest.approx(wanted, rel=1e-3), name
    momentum = job.optimizer.schedules[0].values
    assert momentum[1] == [400, 0.97], "nanochat's warmup of the momentum, at any depth"
    assert momentum[2:] == [[pytest.approx(0.35 * steps, abs=1), 0.97], [steps, 0.9]]


@pytest.mark.parametrize("depth", [8, 26])
def test_the_shipped_files_have_them(depth: int) -> None:
    derived, file = at_depth(shipped("gpt_d12"), depth), shipped(f"gpt_d{depth}")
    batch = replace(derived.training, local_batch_size=file.training.local_batch_size)
    assert replace(derived, training=batch) == file


ADAMW = ["--optimizer.schedules=[]", "--optimizer.name=adamw", "--optimizer.param_groups=[]"]
PIECEWISE = ["--lr_scheduler={name='piecewise', points=[[0, 1.0]]}"]


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["--model.name=llama3", "--model.flavor=debug", "--optimizer.param_groups=[]"], "model.name",
         "is for the model gpt; this one is llama3"),
        (["--training.steps=1B tokens"], "training.steps", "needs training.steps as a number"),
        (["--training.global_batch_size=-1"], "training.global_batch_size", "the number of sequences"),
        (ADAMW, "optimizer.name", "for muon only"),
        (["--optimizer.param_groups=[]"], "optimizer.param_groups", "groups of their own for residual_mix"),
        (PIECEWISE, "lr_scheduler.name", "for warmup_stable_decay only"),
        (["--lr_scheduler.total_steps=3000"], "lr_scheduler.total_steps", "does not scale total_steps"),
        (["--lr_scheduler.decay_start=2000"], "lr_scheduler.decay_start", "does not scale decay_start"),
        (["--model.overrides.hidden_dim=1024"], "model.overrides.hidden_dim", "sets hidden_dim itself"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_settings_that_no_rule_scales_are_refused(arguments: list[str], key: str, message: str) -> None:
    job = load_job(str(find_config("gpt_d12")), arguments, 1)
    with pytest.raises(ConfigError, match=message) as error:
        at_depth(job, 8)
    assert error.value.key == key


def test_an_unknown_depth_is_refused() -> None:
    with pytest.raises(ConfigError, match="command line, --depth: 7 is not one of 4, 6, 8, 10, 12, 16"):
        at_depth(shipped("gpt_d12"), 7)


def test_other_overrides_stay() -> None:
    source = load_job(str(find_config("gpt_d12")), ["--model.overrides.logit_softcap=30.0"], 1)
    assert at_depth(source, 8).model.overrides == {
        **shipped("gpt_d12").model.overrides,
        "logit_softcap": 30.0,
    }


def test_a_batch_has_whole_sequences() -> None:
    """Of 1,500 tokens; the number of tokens of the run stays."""
    source = load_job(str(find_config("gpt_d12")), ["--training.seq_len=1500"], 1)
    job, wanted = at_depth(source, 8), at_depth(shipped("gpt_d12"), 8)
    batch = job.training.global_batch_size * 1500
    assert job.training.global_batch_size == 175  # of the 262,144 tokens of a power of two
    assert job.optimizer.lr == pytest.approx(0.02 * (batch / (256 * 1500)) ** 0.5, rel=1e-3)
    ratio = wanted.training.steps * 262_144 / (2520 * 524_288)
    assert job.training.steps == pytest.approx(2520 * 256 * 1500 * ratio / batch, rel=1e-3)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/gpt_d8.toml", "missing: there is no such folder"),
        ("folder", "is a folder; name the file to write"),
        ("file", "exists; choose another, or delete it"),
    ],
)
def test_a_wrong_output_is_one_line(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=message):
        tune.main(["gpt_d12", "--depth=8", f"--output={tmp_path / path}"])
    assert (tmp_path / "file").read_text() == "kept"


def test_the_command_writes_a_job_that_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt_d8.toml"
    assert tune.main(["gpt_d12", "--depth=8", f"--output={path}"]) == 0
    assert capsys.readouterr().out == f"{path}: gpt d8\n"
    assert load_job(str(path), [], 1) == shipped("gpt_d8")
    assert config_main([str(path)]) == 0
    assert "gpt d8" in capsys.readouterr().out
