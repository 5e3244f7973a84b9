"""Pins parameter groups: roles decide on weight decay, the first pattern that matches decides on the rest, a
pattern that selects nothing is an error before training, and the log counts the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import make_job, metrics_of
from tests.support.runs import PP, UNTIED, train_on_rank
from titanlite import cli
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.mesh import ALONE
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import ParamGroup, check_covers
from titanlite.train import train

DOWN = "*.mlp.down_proj.weight"
TINY = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 64}


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Two blocks with tied embeddings, on meta."""
    with torch.device("meta"):
        return Llama3(flavor="debug", overrides=TINY).build()


def saved_weights(job: Job, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by name."""
    tensors = model_tensors(job.model.build())
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": tensors})
    return tensors


def adamw(*groups: dict[str, Any]) -> AdamW:
    return AdamW(lr=0.1, weight_decay=0.2, param_groups=[ParamGroup(**group) for group in groups])


def settings_of(model: Decoder, config: AdamW) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay by parameter name."""
    names = {p: name for name, p in model.named_parameters()}
    groups = config.build(model, ALONE).param_groups
    return {names[p]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_without_groups_only_norms_have_no_decay(model: Decoder) -> None:
    settings = settings_of(model, adamw())
    assert settings.keys() == dict(model.named_parameters()).keys()
    for name, one in settings.items():
        assert one == (0.1, 0.0 if "norm" in name else 0.2), name


def test_the_first_pattern_that_matches_counts(model: Decoder) -> None:
    groups: list[dict[str, Any]] = [
        {"pattern": DOWN, "lr_multiplier": 0.5},
        {"pattern": "*.mlp.*", "weight_decay": 0.0},
        {"pattern": "model.layers.0.input_*", "weight_decay": 1.0},
        {"pattern": "*norm.weight", "lr_multiplier": 2.0},
    ]
    settings = settings_of(model, adamw(*groups))
    assert settings["model.layers.1.mlp.down_proj.weight"] == (0.05, 0.2)
    assert settings["model.layers.1.mlp.up_proj.weight"] == (0.1, 0.0)
    assert settings["model.layers.0.input_layernorm.weight"] == (0.1, 1.0)
    assert settings["model.layers.1.input_layernorm.weight"] == (0.2, 0.0)
    assert settings["model.embed_tokens.weight"] == (0.1, 0.2)
    swapped = settings_of(model, adamw(*groups[1::-1], *groups[2:]))  # control: the order matters
    assert swapped["model.layers.1.mlp.down_proj.weight"] == (0.1, 0.0)


def test_frozen_parameters_are_in_no_group() -> None:
    net = Llama3(flavor="debug", overrides=TINY).build()
    net.get_parameter("model.norm.weight").requires_grad_(False)
    assert settings_of(net, adamw()).keys() == dict(net.named_parameters()).keys() - {"model.norm.weight"}


def test_the_log_has_a_line_for_each_group(model: Decoder) -> None:
    assert adamw({"pattern": DOWN, "lr_multiplier": 0.5}).describe(model) == [
        "adamw: 13 tensors of 276,480 parameters, peak learning rate 0.1, weight decay 0.2",
        "adamw: 5 tensors of 160 parameters, peak learning rate 0.1, weight decay 0",
        f"adamw, {DOWN}: 2 tensors of 4,096 parameters, peak learning rate 0.05, weight decay 0.2",
    ]


@pytest.mark.parametrize(
    ("patterns", "message", "key"),
    [
        (
            ["*.mlp.*", "model.layers.*.mlp.down.weight"],
            "'model.layers.*.mlp.down.weight' matches no parameter; did you mean "
            "'model.layers.*.mlp.down_proj.weight'?",
            "optimizer.param_groups.1.pattern",
        ),
        (
            ["lm_head.*"],
            "'lm_head.*' matches no parameter: embedding and head of this model share a weight (known: ",
            "optimizer.param_groups.0.pattern",
        ),
        (["xyz"], "'xyz' matches no parameter (known: ", "optimizer.param_groups.0.pattern"),
        (
            ["*.mlp.*", DOWN],
            f"'{DOWN}': earlier groups match the same parameters",
            "optimizer.param_groups.1.pattern",
        ),
        (["*.mlp.*", "*.mlp.*"], "'*.mlp.*': earlier groups match", "optimizer.param_groups.1.pattern"),
    ],
)
def test_a_pattern_that_selects_nothing_is_refused(
    model: Decoder, patterns: list[str], message: str, key: str
) -> None:
    with pytest.raises(ConfigError) as e:
        adamw(*({"pattern": pattern} for pattern in patterns)).check(model)
    assert str(e.value).startswith(message)
    assert e.value.key == key
    adamw({"pattern": "*.mlp.*"}, {"pattern": "*"}).check(model)


@pytest.mark.parametrize("key", ["lr_multiplier", "weight_decay"])
def test_values_that_no_group_can_have_are_refused(key: str) -> None:
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError) as e:
            ParamGroup(pattern="*", **{key: value})
        assert e.value.key == key


@pytest.mark.parametrize("verb", ["train", "config"])
def test_a_file_with_a_wrong_pattern_is_refused_at_its_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    make_job(tmp_path, corpus)
    path = tmp_path / "job.toml"
    path.write_text(path.read_text() + '\n[[optimizer.param_groups]]\npattern = "*.norms.*"\n')
    line = len(path.read_text().splitlines())
    where = [f"--job.dump_folder={tmp_path / 'run'}", f"--data.cache_dir={corpus / 'cache'}"]
    assert cli.run([verb, str(path), *where]) == 2
    said = capsys.readouterr().err
    assert f"job.toml:{line}: optimizer.param_groups.0.pattern: '*.norms.*' matches no parameter" in said
    assert not (tmp_path / "run").exists()


def test_a_group_trains_with_its_own_learning_rate(tmp_path: Path, corpus: Path) -> None:
    frozen = '--optimizer.param_groups=[{pattern = "*.mlp.*", lr_multiplier = 0.0}]'
    job = make_job(tmp_path, corpus, frozen, "--training.steps=2", "--checkpoint.interval=1")
    assert train(job) == 0
    before, after = (saved_weights(job, step) for step in (1, 2))
    for name in before:
        assert torch.equal(before[name], after[name]) == (".mlp." in name), name


@pytest.mark.full
def test_a_pipeline_rank_may_have_no_parameter_of_a_group(tmp_path: Path, corpus: Path, run_on: Any) -> None:
    first_block = '--optimizer.param_groups=[{pattern = "model.layers.0.*", lr_multiplier = 0.5}]'
    keys = [UNTIED, first_block, "--training.steps=4"]
    run_on(1, train_on_rank, tmp_path, corpus, keys, "one", 1)
    run_on(2, train_on_rank, tmp_path, corpus, [*keys, PP], "two", 2)
    run_on(1, train_on_rank, tmp_path, corpus, [*keys, "--optimizer.param_groups=[]"], "without", 1)
    one, two, without = (
        [line["train/loss"] for line in metrics_of(make_job(tmp_path, corpus, name=name))]
        for name in ("one", "two", "without")
    )
    assert two == pytest.approx(one, abs=1e-5)
    assert without != pytest.approx(one, abs=1e-5)  # control


def test_an_optimizer_that_lacks_parameters_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    check_covers(torch.optim.SGD(trained, lr=0.1), model)
    with pytest.raises(ConfigError, match=r"SGD lacks 1 trained parameters, for example 1\.weight"):
        check_covers(torch.optim.SGD(trained[:2], lr=0.1), model)
