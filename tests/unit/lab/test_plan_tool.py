"""`titanlite plan`: what it prints, its JSON, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from titanlite import cli
from titanlite.lab.memory import KINDS

Capture = pytest.CaptureFixture[str]
BIG = ["plan", "llama3_8b", "--gpus=8xH100"]


def printed(capsys: Capture, *words: str) -> str:
    assert cli.run([*words]) == 0
    return capsys.readouterr().out


def planned(capsys: Capture, *words: str) -> dict[str, Any]:
    return json.loads(printed(capsys, *words, "--json"))  # type: ignore[no-any-return]


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


@pytest.mark.full
def test_the_text_says_whether_it_fits(capsys: Capture) -> None:
    words = ["plan", "llama3_70b", "--activation_checkpoint.mode=none", "--model.overrides.n_layers=40"]
    text = printed(capsys, *words, "--gpus=8xH100")
    assert "\ndoes not fit: " in text
    assert "H100 has 79.1 GiB" in text
    assert "no step time, hours or cost, because this layout does not fit: --top=3 lists" in text
    assert not re.search("MFU|tokens/s|GPU hours|failure", text)
    plan = planned(capsys, *words, "--gpus=8xH100", "--top=1")
    assert plan["time"] is None
    assert "\nfits: " in printed(capsys, *words, "--gpus=64xB200", "--model.overrides.n_layers=8")


def test_a_step_time_that_was_not_measured_is_called_a_guess(capsys: Capture) -> None:
    small = ["plan", "qwen3_30m", "--gpus=1xH200"]
    guess = "a guess, as are tokens/s, MFU, hours and cost: models below 500M parameters took"
    assert guess in printed(capsys, *small)
    assert planned(capsys, *small)["time"]["guess"]
    measured = ["plan", "qwen3_0_6b", "--gpus=1xH200"]
    assert "guess" not in printed(capsys, *measured)  # control
    assert planned(capsys, *measured)["time"]["guess"] == []


def test_the_law_of_training_from_scratch_is_left_out_with_adapters(capsys: Capture) -> None:
    words = ["plan", "qwen3_0_6b", "--gpus=1xH200"]
    text = printed(capsys, *words, "--lora.enable", "--checkpoint.initial_load_path=base")
    assert "checkpoint: " in text
    assert "optimal" not in text
    assert "with [lora], steps took" in text
    assert "\ncompute-optimal for" in printed(capsys, *words)  # control


def test_experts_are_counted_but_the_law_of_dense_models_is_not_asked(capsys: Capture) -> None:
    flavor = ["--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--model.overrides.n_layers=8"]
    plan = planned(capsys, "plan", "llama3_1b", "--gpus=1xH200", *flavor)
    assert plan["model"]["parameters"] == 5_607_297_024
    assert plan["memory"]["weights_gib"] == pytest.approx(4 * 5_607_297_024 / 2**30)
    assert plan["optimum"] is None
    assert "experts" in " ".join(plan["notes"])
    active = 5_607_297_024 - 8 * 120 * 3 * 2048 * 768 - 151936 * 2048  # without 120 experts per block
    assert plan["model"]["matmul_parameters"] == active


@pytest.mark.full
def test_experts_on_axes_of_their_own(capsys: Capture) -> None:
    words = ["qwen3_30b_a3b", "--gpus=8xH200", "--parallelism.fsdp_reshard_after_forward=never"]
    plans = {
        degree: planned(capsys, "plan", *words, f"--parallelism.expert_parallel_degree={degree}")
        for degree in (1, 2, 8)
    }
    assert plans[2]["layout"] == "dp_shard 8, experts: expert_fsdp 4 x expert 2"
    experts_gib = 48 * 128 * 3 * 2048 * 768 * 2 / 2**30
    for degree in (2, 8):
        ours, theirs = plans[degree]["memory"], plans[1]["memory"]
        assert ours["weights_gib"] == pytest.approx(theirs["weights_gib"], rel=1e-3)
        freed = theirs["gathered_gib"] - ours["gathered_gib"]
        assert freed == pytest.approx(experts_gib * (1 - 1 / degree), rel=0.05)
        assert plans[degree]["time"]["parts_s"]["expert parallel"] > 0
    assert "expert parallel" not in plans[1]["time"]["parts_s"]
    best = planned(capsys, "plan", *words, "--model.overrides.n_layers=6", "--top=9")["layouts"]
    degrees = {row["layout"].rpartition("x expert ")[2]: row["overrides"] for row in best}
    assert "2" in degrees
    assert "--parallelism.expert_parallel_degree=2" in degrees["2"]


def test_a_distance_that_is_too_small_to_tell_is_not_given(capsys: Capture) -> None:
    words = ["plan", "llama3_1b", "--gpus=1xH100"]  # 20 tokens per parameter
    texts = []
    for tokens in ([], ["--tokens=2T"]):
        texts.append(printed(capsys, *words, *tokens))
    assert "a loss less than 0.01 nats lower" in texts[0]
    assert re.search(r"a loss 0\.\d\d nats lower", texts[1])


@pytest.mark.full
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
    text = printed(capsys, *words, "--top=2")
    assert "layouts that fit, the fastest first" in text
    refused = [line for line in text.splitlines() if line.startswith("not ")]
    assert len(refused) == len({row["reason"] for row in plan["refused_layouts"]})
    (shared,) = [line for line in refused if "embedding and head share" in line]
    assert shared.startswith("not pp 2: parallelism.pipeline_parallel_degree: embedding")


@pytest.mark.full
def test_layouts_that_do_not_fit_are_one_line(capsys: Capture) -> None:
    words = ["plan", "llama3_8b", "--gpus=2xL4", "--top=1"]
    rows = planned(capsys, *words)["refused_layouts"]
    large = [row for row in rows if row["peak_gib"]]
    assert len(large) > 2
    assert all(row["peak_gib"] > 16 for row in large)
    (line,) = [line for line in printed(capsys, *words).splitlines() if ": too large even with" in line]
    sizes = [f"{row['layout']} ({row['peak_gib']:.0f} GiB)" for row in large]
    assert line == f"not {', '.join(sizes)}: too large even with mode = 'full' and micro-batches of 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus=8xV99"], "--gpus: unknown GPU 'V99'"),
        (["--gpus=3xH100", "--parallelism.tensor_parallel_degree=2"], "3 ranks are no multiple"),
        (["--gpus-per-node=0"], "--gpus-per-node: 0 is below 1"),
        (["--training.steps=2 epochs"], "epochs cannot be counted"),
        (["--gpus="], "command line, --gpus: '' is not a number and a GPU such as 64xH100"),
        (
            ["--gpus=8xH100", "--gpus-per-node=3"],
            "command line, --gpus-per-node: 8 GPUs are no multiple of 3",
        ),
        (["--tokens=1"], "command line, --tokens: '1 token' is less than one step, "),
        (["--tokens="], "argument --tokens: '' is not a number of tokens such as 160B"),
        (["--tokens=160 B"], "'160 B' is not a number of tokens such as 160B"),
        (
            ["--model.overrides.n_layers=1001"],
            "command line, --model.overrides.n_layers: a plan counts at most",
        ),
        (["--measured=no/such.json"], "command line, --measured: no/such.json cannot be read: No such file"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys: Capture, words: list[str], message: str) -> None:
    assert cli.run(["plan", "llama3_8b", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("llama3_1B", "no configuration 'llama3_1B': there is no such file, and no shipped configuration"),
        ("no/such", "no/such: cannot read the configuration: "),
        (str(Path(__file__).parent), "name a TOML file or a run folder to plan: "),
    ],
)
def test_what_is_no_configuration_is_refused(capsys: Capture, config: str, message: str) -> None:
    assert cli.run(["plan", config]) == 2
    assert message in capsys.readouterr().err


def test_small_jobs_have_small_units(capsys: Capture) -> None:
    text = printed(capsys, "plan", "debug", "--gpus=1xH100", "--price=2")
    assert re.search(r"\ntogether +0\.000\d{3}\n", text)
    assert re.search(r"\nabout [\d.]+M tokens/s per GPU, MFU ", text)
    cost = "less than 0.01 in the currency of --price"
    assert re.search(rf"\n[\d.]+ minutes, less than 0\.01 GPU hours, {cost}\n", text)
    assert "\ncheckpoint: 21.0 MiB\n" in text
    assert "extrapolated, because the law's runs had at least 70M parameters and 5B tokens" in text
    assert "extrapolated" not in printed(capsys, "plan", "llama3_8b", "--gpus=64xH100")  # control


def test_layouts_that_are_slow_or_refused_are_noted(capsys: Capture) -> None:
    def has(text: str, *words: str) -> bool:
        return any(text in note for note in planned(capsys, "plan", "llama3_1b", *words)["notes"])

    batch = "--training.global_batch_size=4096"
    assert has("FSDP shards over 2,048 ranks", "--gpus=2048xH100", batch, "--training.local_batch_size=1")
    assert not has("FSDP shards over", "--gpus=1024xH100", batch, "--training.local_batch_size=1")
