"""Runs the commands of docs/finetuning.md, and holds the page to the recorded runs of benchmarks/finetune.py
and benchmarks/lora_memory.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import finetune, lora_memory
from benchmarks.finetune import ADAPTERS, BEFORE, FULL, PAGE
from benchmarks.tutorial import blocks
from tests.support.quoted_code import ROOT

SHORTER = {  # what the test runs in place of the page's text
    "steps = 50": "steps = 4",
    "warmup_steps = 5": "warmup_steps = 1",
    "interval = 25": "interval = 4",
    "freq = 10": "freq = 2",
    "--lora.enable": "--lora.enable --lora.rank=4",
}


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def recorded(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def test_the_page_has_the_recorded_losses_and_answers() -> None:
    text, result = page(), recorded(finetune.RESULT)
    assert text == finetune.refreshed(text, result), "run: python benchmarks/finetune.py"
    if result is not None:
        commands = [command["command"] for command in result["commands"]]
        assert commands == [block.text for block in blocks(text) if block.is_command]
    memory = recorded(lora_memory.RESULT)
    assert text == lora_memory.refreshed(text, memory), "run: python benchmarks/lora_memory.py"


def test_the_questions_on_the_page_are_held_out(tmp_path: Path) -> None:
    script = ROOT / "benchmarks/stdlib_conversations.py"
    subprocess.run([sys.executable, script, "--output", tmp_path], check=True, stdout=subprocess.PIPE)
    held_out, train = (
        (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for name in ("held_out", "train")
    )
    assert (len(held_out), len(train)) == (40, 200)
    questions = {block.text for block in blocks(page()) if "--prompt" in block.text}
    asked = {text for words in questions for text in words.split('"')[1::2]}
    assert len(asked) == 2
    assert asked <= {json.loads(line)["messages"][0]["content"] for line in held_out}
    assert not asked & {json.loads(line)["messages"][0]["content"] for line in train}
    assert held_out[0] in page().splitlines()


@pytest.mark.full  # 40 CPU seconds
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    for name in ("PATH", "PYTHON"):  # set_up changes them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    text = page()
    for ours, shorter in SHORTER.items():
        assert text.count(ours) == 1, ours
        text = text.replace(ours, shorter)
    config = str(ROOT / "train_configs/llama3_8b.toml")
    lora_memory.write_base(config, ["--model.flavor=debug"], tmp_path / "model")
    finetune.set_up(tmp_path / "run", tmp_path / "model")
    result = finetune.run(text, tmp_path / "run", {BEFORE: finetune.TRIALS[BEFORE]}, 1)
    runs = result["runs"]
    first = {name: runs[name]["reports"][0]["train/loss"] for name in (FULL, ADAPTERS, BEFORE)}
    assert first[ADAPTERS] == pytest.approx(first[FULL], abs=1e-5)
    assert first[BEFORE] == pytest.approx(first[FULL], abs=1e-5)
    held_out = [report["eval/loss"] for report in runs[FULL]["reports"] if "eval/loss" in report]
    assert held_out[-1] < held_out[0] < runs[BEFORE]["reports"][0]["eval/loss"]
    written = finetune.refreshed(text, {**result, "answers_in_library": [1, 40]})
    assert "Unmeasured" not in written.partition("table: lora_memory")[0]
    assert (tmp_path / "run/models/qwen3-30m-adapter/adapter_config.json").exists()
