"""`titanlite plan`: what it prints, its JSON, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from titanlite import cli
from titanlite.planning.memory import KINDS

Capture = pytest.CaptureFixture[str]
BIG = ["plan", "llama3_8b", "--gpus=8xH100"]


def planned(capsys: Capture, *words: str) -> dict[str, Any]:
    assert cli.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_parts_add_up(capsys: Capture) -> None:
    plan = planned(capsys, *BIG, "--price=2.5", "--training.steps=1000")
    memory, time, run = plan["memory"], plan["time"], plan["run"]
    assert sum(memory[f"{kind}_gib"] for kind in KINDS) == pytest.approx(memory["peak_allocated_gib"])
    assert sum(time["parts_s"].values()) == pytest.approx(time["step_s"])
    assert plan["model"]["parameters"] == 8_030_261_248
    assert run["tokens"] == 1000 * 512 * 8192
    assert run["flops"] == run["tokens"] * (6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192)
    assert time["gpu_hours"] == pytest.approx(8 * time["hours"])
    assert time["hours"] == pytest.approx(1000 * time["step_s"] / 3600)
    assert time["price"] == pytest.approx(2.5 * time["gpu_hours"])
    assert plan["checkpoint"]["gib"] == pytest.approx(12 * 8_030_261_248 / 2**30)
    assert plan["fits"] == "fits"


def test_tokens_replace_the_steps(capsys: Capture) -> None:
    plan = planned(capsys, *BIG, "--tokens=160B")
    assert plan["run"]["steps"] == 160_000_000_000 // (512 * 8192)
    assert plan["optimum"]["tokens_per_parameter"] == pytest.approx(19.9, abs=0.05)


def test_a_stage_with_shorter_sequences_needs_fewer_flops(capsys: Capture) -> None:
    steps = ["--training.steps=100", "--training.global_batch_size=8"]
    stage = '--stages=[{name="short", until="400 sequences", seq_len=1024}, {name="long", until="end"}]'
    whole, staged = (planned(capsys, *BIG, *steps, *words)["run"] for words in ([], [stage]))
    attention = 12 * 32 * 4096 * (8192 - 1024)
    assert whole["flops"] - staged["flops"] == 400 * 8192 * attention


def test_the_text_says_whether_it_fits(capsys: Capture) -> None:
    words = ["plan", "llama3_70b", "--activation_checkpoint.mode=none"]
    assert cli.run([*words, "--gpus=8xH100"]) == 0
    text = capsys.readouterr().out
    assert "\ndoes not fit: " in text
    assert "H100 has 79.1 GiB" in text
    assert cli.run([*words, "--gpus=64xB200", "--model.overrides.n_layers=8"]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_a_step_time_that_was_not_measured_is_called_a_guess(capsys: Capture) -> None:
    small = ["plan", "qwen3_30m", "--gpus=1xH200"]
    assert cli.run(small) == 0
    guess = "a guess, as are tokens/s, MFU, hours and cost: models below 500M parameters took"
    assert guess in capsys.readouterr().out
    assert planned(capsys, *small)["time"]["guess"]
    measured = ["plan", "qwen3_0_6b", "--gpus=1xH200"]
    assert cli.run(measured) == 0
    assert "guess" not in capsys.readouterr().out  # control
    assert planned(capsys, *measured)["time"]["guess"] == []


def test_the_law_of_training_from_scratch_is_left_out_with_adapters(capsys: Capture) -> None:
    words = ["plan", "qwen3_0_6b", "--gpus=1xH200"]
    assert cli.run([*words, "--lora.enable", "--checkpoint.initial_load_path=base"]) == 0
    text = capsys.readouterr().out
    assert "checkpoint: " in text
    assert "optimal" not in text
    assert "half the parameters" not in text
    assert "with [lora], steps took" in text
    assert cli.run(words) == 0
    assert "\nhalf the parameters" in capsys.readouterr().out  # control


def test_a_distance_that_is_too_small_to_tell_is_not_given(capsys: Capture) -> None:
    words = ["plan", "llama3_1b", "--gpus=1xH100"]  # 20 tokens per parameter
    texts = []
    for tokens in ([], ["--tokens=2T"]):
        assert cli.run([*words, *tokens]) == 0
        texts.append(capsys.readouterr().out)
    assert "a loss less than 0.01 nats lower" in texts[0]
    assert re.search(r"a loss 0\.\d\d nats lower", texts[1])
    assert texts[0].count(" FLOPs") == 1  # of the smaller model, in units of the run's


def test_layouts_are_listed_as_overrides_that_a_job_accepts(capsys: Capture) -> None:
    words = ["plan", "debug", "--gpus=2xH100", "--training.local_batch_size=2"]
    plan = planned(capsys, *words, "--top=2")
    assert len(plan["layouts"]) == 2
    first = plan["layouts"][0]
    again = planned(capsys, *words, *first["overrides"])
    assert again["time"]["step_s"] == pytest.approx(first["step_s"])
    assert again["memory"]["peak_allocated_gib"] == pytest.approx(first["peak_allocated_gib"])
    assert again["layout"] == first["layout"]
    assert any("embedding and head share" in row["reason"] for row in plan["refused_layouts"])
    assert cli.run([*words, "--top=2"]) == 0
    text = capsys.readouterr().out
    assert "layouts that fit, the fastest first" in text
    assert f"not {plan['refused_layouts'][0]['layout']}: " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus=8xV99"], "--gpus: unknown GPU 'V99'"),
        (["--gpus=3xH100", "--parallelism.tensor_parallel_degree=2"], "parallelism: 3 ranks are no multiple"),
        (["--gpus-per-node=0"], "--gpus-per-node: 0 is below 1"),
        (["--training.steps=2 epochs"], "epochs cannot be counted"),
        (["--tokens=1"], "--training.steps"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys: Capture, words: list[str], message: str) -> None:
    assert cli.run(["plan", "llama3_8b", *words]) == 2
    assert message in capsys.readouterr().err
