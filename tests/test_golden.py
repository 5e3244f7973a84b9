"""The numerics are pinned: losses and gradient norms of the golden runs to a relative 1e-5 (gpt: 1e-4), their
data order and initial weights exactly. If one of these fails, the change under test has changed what
titanlite computes; CONTRIBUTING.md says what to do then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import golden
from tests.support.tiers import full, sampled
from titanlite.models.base import ModelFamily

WARMUP, BETA2, EPS = "--lr_scheduler.warmup_steps=3", "--optimizer.beta2=0.9501", "--optimizer.eps=2e-8"
THETA = "--model.overrides.rope_theta"
CONTROLS = [  # run, changed setting; the comment is the largest difference found, in units of the tolerance
    ("llama3", EPS),  # 2.3; it is 1e-8
    full("llama3", BETA2),  # 5.1; it is 0.95
    full("llama3", WARMUP),  # 7900; it is 2
    full("llama3", f"{THETA}=550000.0"),  # 8; it is 500,000
    full("qwen3", f"{THETA}=1010000.0"),  # 10; it is 1,000,000
    full("packed", BETA2),  # 4.8
]


# The full tier has the other families; the default tier compares their logits with those of transformers.
DEFAULT_TIER = {"debug", "llama3", "gpt", "qwen3_5_moe", "deepseek_v3", "packed"}


@pytest.mark.parametrize("name", sampled(golden.RUNS, DEFAULT_TIER))
def test_losses_and_data_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    actual = golden.losses(golden.make(name, tmp_path))
    tolerance = golden.TOLERANCES.get(name, golden.TOLERANCE)
    differences = golden.differences(actual, golden.stored()[name]["steps"], tolerance)
    if differences:
        told = [f"{name}: the numerics have changed; CONTRIBUTING.md says what to do", *differences]
        pytest.fail("\n".join(told), pytrace=False)


@pytest.mark.parametrize("name", sampled(golden.RUNS, DEFAULT_TIER - {"debug"}))
def test_initial_weights_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    actual = golden.weights_sha(golden.make(name, tmp_path))
    assert actual == golden.stored()[name]["initial_weights"]


@pytest.mark.parametrize(("name", "change"), CONTROLS)
def test_a_slightly_changed_setting_is_noticed(name: str, change: str, tmp_path: Path) -> None:
    actual = golden.losses(golden.make(name, tmp_path, change))
    wanted = golden.stored()[name]["steps"]
    assert golden.differences(actual, wanted)
    shas = [[line["data/batch_sha"] for line in lines] for lines in (actual, wanted)]
    assert shas[0] == shas[1], "the data order depends on none of these settings"


def test_another_seed_gives_other_data_and_weights(tmp_path: Path) -> None:
    wanted, other = golden.stored()["llama3"], "--training.seed=1"
    actual = golden.losses(golden.make("llama3", tmp_path, other))
    assert not {line["data/batch_sha"] for line in actual} & {
        line["data/batch_sha"] for line in wanted["steps"]
    }
    sha = golden.weights_sha(golden.make("llama3", tmp_path, other, run="untrained"))
    assert sha != wanted["initial_weights"]


@pytest.mark.full
def test_two_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    runs = [golden.losses(golden.make("packed", tmp_path, run=run)) for run in ("first", "second")]
    assert runs[0] == runs[1]


def test_every_model_family_has_a_golden_run(tmp_path: Path) -> None:
    shipped = {name for name, c in ModelFamily.choices.items() if c.__module__.startswith("titanlite.")}
    shipped.remove("huggingface")  # stands for another family
    assert shipped == {golden.make(name, tmp_path / name).model.name for name in golden.RUNS}


@pytest.mark.parametrize("key", [*golden.NUMBERS, "data/batch_sha"])
def test_a_changed_value_is_told(key: str) -> None:
    wanted = golden.stored()["llama3"]["steps"]
    line = wanted[-1]
    other = "0" * 16 if key == "data/batch_sha" else line[key] * (1 + 2 * golden.TOLERANCE)
    assert not golden.differences(wanted, wanted)
    (told,) = golden.differences([*wanted[:-1], line | {key: other}], wanted)
    assert told.startswith(f"step 8: {key} ")
    if key != "data/batch_sha":
        assert golden.differences([*wanted[:-1], line | {key: float("nan")}], wanted)
    assert golden.differences(wanted[:-1], wanted)
