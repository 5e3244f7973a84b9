"""On a GPU: Qwen3 trains, is exported, gives transformers' text, and starts another run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.gpu import column, run
from titanlite import cli
from titanlite.tools import generate

pytestmark = pytest.mark.gpu
QWEN3 = ["--model.name=qwen3", "--model.flavor=debug", "--training.steps=6", "--data.holdout_sequences=0"]


def exported(folder: Path) -> Path:
    """The export of the newest checkpoint of a run."""
    assert cli.run(["export", str(folder), str(folder / "hf"), "--dtype=float32"]) == 0
    return folder / "hf"


def test_qwen3_goes_out_and_comes_in(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path, corpus, *QWEN3, "--compile.enable", name="first")
    export = exported(tmp_path / "first")
    second = run(tmp_path, corpus, *QWEN3, f"--checkpoint.initial_load_path={export}", name="second")
    losses = column(first, "train/loss"), column(second, "train/loss")
    assert losses[1][0] < losses[0][0] - 0.2  # the same sequences, after six steps of training
    assert json.loads((export / "config.json").read_text())["model_type"] == "qwen3"
    texts = []
    prompts = [
        "--prompt",
        "ab cd",
        "--prompt",
        "fghij abc de",
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
    ]
    capsys.readouterr()  # the export has printed a line
    for path in (tmp_path / "first", export):
        assert generate.main([str(path), *prompts]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "--- 2 of 2" in texts[0]


def test_logits_are_transformers_on_a_gpu(tmp_path: Path, corpus: Path) -> None:
    run(tmp_path, corpus, *QWEN3, "--checkpoint.async_mode=disabled", name="run")
    export, tokens = exported(tmp_path / "run"), torch.arange(64, device="cuda")[None] % 250
    source = generate.open_source(export, torch.device("cuda"), allow_imports=False)
    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.bfloat16).to("cuda")
    with torch.no_grad():
        ours, wanted = source.net(tokens).float(), theirs(tokens).logits.float()
    assert (ours - wanted).norm() < 0.02 * wanted.norm()  # bf16 rounding
    assert (ours - wanted.roll(1, 1)).norm() > 0.04 * wanted.norm()
