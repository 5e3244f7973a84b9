"""`titanlite tune --coordinate-check` passes under the width rules, and fails without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiers import full
from titanlite import cli
from titanlite.config import toml

CHECK = ["tune", "debug", "--coordinate-check"]
SMALL = [*CHECK, "--widths=128,256,512", "--seeds=1", "--model.overrides.n_layers=1"]
MUON = ["--optimizer.name=muon", "--widths=128,256,512"]


def test_the_rules_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--target-width=512", f"--output={tmp_path / 'it.json'}"]) == 0
    table, _, settings = capsys.readouterr().out.partition("\n\n")
    assert table.splitlines()[-1] == "passed: all slopes are within 0.1 of zero"
    assert settings.startswith("# settings for width 512, carried from width 128\n[model.overrides]\n")
    tree = toml.parse(settings)
    assert tree["model"]["overrides"]["logit_scale"] == 0.25
    assert tree["optimizer"]["param_groups"][0]["lr_multiplier"] == 0.25
    record = json.loads((tmp_path / "it.json").read_text())
    assert record["passed"]
    assert abs(record["slopes"]["block 0"]["change"]) < 0.1
    assert record["rms"].keys() == {"128", "256", "512"}


def test_control_the_standard_parametrisation_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--standard", "--widths=128,256"]) == 1
    out = capsys.readouterr().out
    assert "failed: a slope of block 0 is " in out
    assert "settings" not in out
    row = next(line for line in out.splitlines() if line.startswith("block 0"))
    assert float(row.split()[-2]) > 0.5


@pytest.mark.parametrize(
    "keys",
    [
        *map(full, [
            [], ["--model.name=qwen3"], ["--model.overrides.tie_word_embeddings=false"],
            MUON, [*MUON, "--optimizer.adjust_lr_fn=spectral"],
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_every_rule_passes(keys: list[str]) -> None:
    assert cli.run([*CHECK, *keys]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (CHECK[:2], "name what to do: --coordinate-check"),
        ([*CHECK, "--widht=3"], "unknown option '--widht'; did you mean '--widths'?"),
        ([*CHECK, "--widths=128"], "'128' is not a list of two or more widths"),
        ([*CHECK, "--widths=128,0"], "'128,0' is not a list of two or more widths"),
        ([*CHECK, "--widths=128,200"], "width 200 has 200 query features, no multiple of head_dim 32"),
        ([*CHECK, "--steps=0"], "--steps: 0 is below 1"),
        ([*CHECK, "--base-width=x"], "invalid int value: 'x'"),
        ([*CHECK, "--optimizer.lrr=1"], "unknown key 'lrr'; did you mean 'lr'?"),
        ([*CHECK, "--optimizer.param_groups=[{pattern='*'}]"], "divide the group"),
        (["tune", "nowhere", "--coordinate-check"], "nowhere"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("titanlite: ")
    assert error.count("\n") == 1
