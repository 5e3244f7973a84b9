"""`titanlite tune --coordinate-check` passes under the width rules, and fails without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiers import full
from titanlite import cli
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.shipped import shipped_configs
from titanlite.job import load_job
from titanlite.lab import width as rules
from titanlite.lab.coordinate_check import (
    Size,
    Slopes,
    SmallRun,
    largest_slope,
    measured_sizes,
    random_batches,
    slopes,
)
from titanlite.lab.tune import at_width, slopes_table, verdict
from titanlite.lab.verbs import tune_arguments
from titanlite.lab.width import param_groups_at
from titanlite.optim.base import ParamGroup

ROOT = Path(__file__).resolve().parents[3]

CHECK = ["tune", "debug", "--coordinate-check"]
NARROW = "--widths=128,256,512"
SMALL = [*CHECK, NARROW, "--seeds=1", "--model.overrides.n_layers=1"]
FEW = (NARROW, "--model.overrides.n_layers=2")
EXPERT_KEYS = [
    (*FEW, "--model.name=qwen3_moe"),
    (*FEW, "--model.name=olmoe", "--moe.load_balance=none"),
    (*FEW, "--model.name=qwen3_moe", "--optimizer.name=muon", "--optimizer.adjust_lr_fn=spectral"),
]
MUON = ["--optimizer.name=muon", NARROW]


def test_the_rules_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--target-width=512", f"--output={tmp_path / 'it.json'}"]) == 0
    table, _, settings = capsys.readouterr().out.partition("\n\n")
    assert table.splitlines()[-1] == "passed: all slopes are within 0.15 of zero"
    assert settings.startswith("# settings for width 512, carried from width 128\n[model.overrides]\n")
    tree = toml.parse(settings)
    assert tree["model"]["overrides"]["logit_scale"] == 0.25
    assert tree["optimizer"]["param_groups"][0]["lr_multiplier"] == 0.25
    record = json.loads((tmp_path / "it.json").read_text())
    assert record["passed"]
    assert abs(record["slopes"]["block 0"]["change"]) < 0.1
    assert record["rms"].keys() == {"128", "256", "512"}


def test_the_check_follows_schedules() -> None:
    def change(*words: str) -> float:
        keys = ["--model.overrides.n_layers=1", "--model.overrides.vocab_size=256", *words]
        job = load_job("debug", keys, world_size=1)
        trial = SmallRun(job, random_batches(3, (1, 32), 256, 0), 0, torch.device("cpu"))
        return measured_sizes(trial, lambda: None)["block 0"].change

    def scheduled(beta1: float) -> float:
        return change(f"--optimizer.schedules=[{{key='beta1', values=[[0, {beta1}]]}}]")

    assert scheduled(0.5) == change("--optimizer.beta1=0.5")
    assert scheduled(0.5) != scheduled(0.9)  # control


@pytest.mark.full
def test_control_the_standard_parametrisation_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--standard", "--widths=128,512"]) == 1
    out = capsys.readouterr().out
    assert "failed: a slope of block 0 is " in out
    assert "settings" not in out
    row = next(line for line in out.splitlines() if line.startswith("block 0"))
    assert float(row.split()[-2]) > 0.5


EXPERTS = ["tune", "moe_debug", *SMALL[2:]]


@pytest.mark.full
def test_the_rules_pass_with_experts() -> None:
    assert cli.run(EXPERTS) == 0


@pytest.mark.full
def test_control_experts_fail_without_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*EXPERTS, "--standard"]) == 1
    rows = {line[:8]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert float(rows["router 0"][-1]) > 0.5
    assert float(rows["block 0 "][-2]) > 0.5


@pytest.mark.full
def test_control_a_router_that_keeps_its_rate_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the check of its own logits sees it: its share of a block's output is small."""

    def without_router(*args: Any) -> list[ParamGroup]:
        return [group for group in param_groups_at(*args) if "mlp.gate" not in group.pattern]

    monkeypatch.setattr(rules, "param_groups_at", without_router)
    assert cli.run(EXPERTS) == 1
    assert "failed: a slope of router 0" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_model_can_be_checked(name: str) -> None:
    job = load_job(name, world_size=None)
    options, _ = tune_arguments([name, "--coordinate-check"])
    without_rules = {
        "deepseek_v3": "no rules for other widths of latent attention",
        "gemma3": "no rules for other widths of a model whose embedding is multiplied",
        "gpt": "gpt has rules for other depths",
        "qwen3_5": "no rules for other widths of gated delta nets",
    }
    if job.model.name in without_rules:
        with pytest.raises(ConfigError, match=without_rules[job.model.name]):
            at_width(job, options.widths[0], options)
        return
    groups = set()
    for width in options.widths:
        small = at_width(job, width, options)
        config = small.model.config
        assert config.dim == width
        groups.add(config.n_heads / config.n_kv_heads)
        small.optimizer.check(small.model.build_on_meta())
    assert groups == {job.model.config.n_heads / job.model.config.n_kv_heads}


def recorded(name: str) -> tuple[dict[int, dict[str, Size]], dict[str, Slopes]]:
    """The sizes and slopes in a file of benchmarks/results."""
    record = json.loads((ROOT / "benchmarks/results" / name).read_text())
    sizes = {int(w): {key: Size(**size) for key, size in rms.items()} for w, rms in record["rms"].items()}
    return sizes, {name: Slopes(**slope) for name, slope in record["slopes"].items()}


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("with the rules", "coordinate_check_2_cores.json"),
        ("without rules", "coordinate_check_standard_2_cores.json"),
    ],
)
def test_docs_quote_the_recorded_checks(title: str, name: str) -> None:
    sizes, slopes_of = recorded(name)
    quoted = (ROOT / "docs/optimizers.md").read_text().partition(f'```text title="{title}"\n')[2]
    assert quoted.partition("\n```")[0] == "\n".join(
        [*slopes_table(sizes, slopes_of, 5), verdict(slopes_of, [*sizes])]
    )
    assert slopes(sizes) == {
        key: Slopes(value.output and pytest.approx(value.output), pytest.approx(value.change))
        for key, value in slopes_of.items()
    }


def test_the_limit_leaves_room_for_the_scatter_of_few_widths() -> None:
    """Three of the recorded widths pass with the rules, which the limit for four would refuse, and fail
    without."""
    for name, passes in (("coordinate_check_2_cores", True), ("coordinate_check_standard_2_cores", False)):
        sizes, _ = recorded(f"{name}.json")
        few = {width: sizes[width] for width in (128, 256, 512)}
        assert verdict(slopes(few), [*few]).startswith("passed") == passes
        assert verdict(slopes(few), [*sizes]).startswith("failed")
    assert largest_slope([128, 1024]) == largest_slope([128, 256, 512, 2048]) == 0.1
    assert largest_slope([128, 512]) == pytest.approx(0.15)


def test_docs_quote_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--target-width=1024", "--widths=128,512", "--steps=1"]) in (0, 1)
    _, _, settings = capsys.readouterr().out.partition("\n\n")
    assert f'```toml title="settings"\n{settings}```' in (ROOT / "docs/optimizers.md").read_text()


def test_the_base_width_keeps_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--target-width=128", "--widths=128,512", "--steps=1"]) in (0, 1)
    assert capsys.readouterr().out.endswith("\n\n# width 128 is the base width: the settings stay\n")


@pytest.mark.parametrize(
    "keys",
    [
        *map(full, [
            ["--seeds=1"], [NARROW, "--model.name=qwen3"],
            [NARROW, "--model.overrides.tie_word_embeddings=false"],
            MUON, [*MUON, "--optimizer.adjust_lr_fn=spectral"], *map(list, EXPERT_KEYS),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_every_rule_passes(keys: list[str]) -> None:
    assert cli.run([*CHECK, *keys]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            CHECK[:2],
            "name what to do: --coordinate-check, --depth, --find-batch, --ladder, --measure, or several ",
        ),
        ([*CHECK, "--widht=3"], "unknown option '--widht'; did you mean '--widths'?"),
        ([*CHECK, "--widths=128"], "'128' is not a list of two or more widths"),
        ([*CHECK, "--widths=128,0"], "'128,0' is not a list of two or more widths"),
        ([*CHECK, "--widths=128,256"], "256 is less than 4 times 128"),
        ([*CHECK, "--widths=128,200,512"], "width 200 has 200 query features, no multiple of head_dim 32"),
        ([*CHECK, "--output=nowhere/it.json"], "nowhere: there is no such folder"),
        ([*CHECK, "--standard", "--target-width=512"], "--target-width: --standard prints no settings"),
        ([*CHECK, "--output=/"], "/ is a folder; name the file to write"),
        ([*CHECK, "--steps=0"], "--steps: 0 is below 1"),
        ([*CHECK, "--base-width=x"], "invalid int value: 'x'"),
        ([*CHECK, "--optimizer.lrr=1"], "unknown key 'lrr'; did you mean 'lr'?"),
        ([*CHECK, "--optimizer.param_groups=[{pattern='*'}]"], "divide the group"),
        (["tune", "nowhere", "--coordinate-check"], "nowhere"),
        (
            [*CHECK, "--optimizer.schedules=[{key='beta1', values=[['1 epoch', 0.8]]}]"],
            "optimizer.schedules.0.values.0.0: the check opens no data, so it cannot count epochs",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("titanlite: ")
    assert error.count("\n") == 1
