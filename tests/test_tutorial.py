"""Runs the commands of docs/tutorial.md, and holds the page to the recorded run of benchmarks/tutorial.py."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tutorial import (
    CURVE,
    PAGE,
    RESULT,
    Block,
    Done,
    blocks,
    quotations,
    refreshed,
    run,
    same_shapes,
    shape,
)

SHORTER = {  # what the test runs in place of the page's text
    "steps = 1200": "steps = 12",
    "Ctrl-C after step 400": "Ctrl-C after step 4",
    "interval = 200": "interval = 2",
    "freq = 100": "freq = 4\n\n[metrics]\nlog_freq = 1",
    'library.rglob("*.py")': 'library.glob("[a-d]*.py")',
    "--max-new-tokens 60": "--max-new-tokens 8",
}


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def needs_what_is_missing(block: Block) -> bool:
    match = re.fullmatch(r"needs (\w+)", block.comment)
    return match is not None and importlib.util.find_spec(match[1]) is None


def check(done: list[Done], folder: Path, *, steps: int) -> None:
    """What the page promises of a run of its commands."""
    outputs = {command.command.split("\n")[0]: "\n".join(command.output) for command in done}
    stopped = outputs["titanlite train my.toml"]
    resumed = outputs["titanlite launch --nproc-per-node=2 my.toml"]
    stop = re.search(r"stopped after step (\d+), which is saved", stopped)
    assert stop is not None, stopped
    step = int(stop[1])
    assert step < steps
    assert f"resumed from outputs/my/checkpoint/step-{step}\n" in resumed
    assert f"changed since step {step}: ranks 1 -> 2" in resumed
    assert f"steps {step + 1} to {steps}" in resumed
    assert f"saved outputs/my/checkpoint/step-{steps} " in resumed
    logged = [json.loads(line) for line in (folder / "outputs/my/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == sorted({line["step"] for line in logged})
    assert logged[-1]["step"] == steps
    assert logged[0]["train/loss"] - logged[-1]["train/loss"] > 1
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    generated = next(text for command, text in outputs.items() if command.startswith("titanlite generate"))
    prompt = "def read_file(path):"
    assert len(generated.partition(prompt)[2].strip()) > 0, generated


@pytest.mark.full  # 40 CPU seconds
def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    text = page()
    for ours, shorter in SHORTER.items():
        assert text.count(ours) == 1, ours
        text = text.replace(ours, shorter)
    done = list(run(text, tmp_path, needs_what_is_missing))
    check(done, tmp_path, steps=12)
    printed = {command.command: command.output for command in done}
    for command, lines in quotations(text):
        if command not in printed:
            continue
        if any(" eta " in line for line in lines):  # of a run, whose steps are others here
            shapes = {shape_without_step(line) for line in printed[command]}
            missing = [line for line in lines if line != "..." and shape_without_step(line) not in shapes]
            assert not missing, f"the page quotes: {missing[0]}"
        else:
            same_shapes(without_repetition(lines), without_repetition(printed[command]))
    loaded = [command for command in done if "AutoModelForCausalLM" in command.command]
    assert all("LlamaForCausalLM" in "\n".join(command.output) for command in loaded)
    assert len(loaded) == (importlib.util.find_spec("transformers") is not None)


def without_repetition(lines: list[str]) -> list[str]:
    """One of each series of lines of one shape: a smaller corpus divides a text into other tokens."""
    return [next(same) for _, same in itertools.groupby(lines, shape)]


def shape_without_step(line: str) -> str:
    return re.sub(r" \d+$", "", shape(line))


def recorded() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))


def test_the_page_quotes_the_recorded_run() -> None:
    text, result = page(), recorded()
    assert text == refreshed(text, result), "run: python benchmarks/tutorial.py"
    assert result["seconds"] < 20 * 60
    commands = [command["command"] for command in result["commands"]]
    assert commands == [block.text for block in blocks(text) if block.is_command]
    assert CURVE.exists()


def test_commands_that_are_not_run_say_so_on_the_page() -> None:
    left_out = [block for block in blocks(page()) if block.language == "bash" and not block.is_command]
    assert [block.comment for block in left_out] == ["not run: needs the network"] * 2
    assert "lm_eval" in left_out[1].text
    assert "**this command was not run**" in page()
