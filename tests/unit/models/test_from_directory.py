"""`[model] name = "huggingface"` takes the model's shape from the config.json of a directory. The run records
the family and its fields, and resumes without the directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import make_job, metrics_of
from tests.support.models import SHAPE
from titanlite import cli
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.models.base import ModelFamily
from titanlite.models.llama3 import Llama3
from titanlite.models.mistral import Mistral
from titanlite.models.qwen2 import Qwen2
from titanlite.train import train

FIELDS = {**SHAPE, "sliding_window": 20, "max_position": 64}
TINY = Mistral(flavor="debug", overrides=FIELDS)


def directory(folder: Path, family: ModelFamily = TINY, **changes: Any) -> Path:
    """A Hugging Face directory with only a config.json. A change to None removes the key."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in (family.hf_config() | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def keys(folder: Path, **overrides: int) -> str:
    return f"--model={toml.dump({'name': 'huggingface', 'path': str(folder), 'overrides': overrides})}"


def argument(folder: Path, *overrides: str) -> str:
    fields = [f'name = "huggingface", path = "{folder}"', *overrides]
    return f"--model={{{', '.join(fields)}}}"


@pytest.mark.parametrize("family", [Qwen2(flavor="0.5B"), Mistral(flavor="7B-v0.1"), Llama3(flavor="8B")])
def test_the_directory_stands_for_the_family(tmp_path: Path, corpus: Path, family: ModelFamily) -> None:
    job = make_job(tmp_path, corpus, argument(directory(tmp_path / "hf", family)), world_size=None)
    assert job.model == family


def test_overrides_come_after_the_directory(tmp_path: Path, corpus: Path) -> None:
    folder = directory(tmp_path / "hf")
    job = make_job(tmp_path, corpus, argument(folder, "overrides = { n_layers = 3, sliding_window = 0 }"))
    assert job.model == Mistral(flavor="debug", overrides={**FIELDS, "n_layers": 3, "sliding_window": 0})
    again = load_job(None, [f"--model={{{_table(job.model)}}}", *_data(job)], world_size=None)
    assert again.model == job.model


def _table(model: ModelFamily) -> str:
    fields = ", ".join(f"{key} = {json.dumps(value)}" for key, value in model.overrides.items())
    return f'name = "{model.name}", flavor = "{model.flavor}", overrides = {{ {fields} }}'


def _data(job: Any) -> list[str]:
    return [f"--data.sources={[{'name': 'text', 'path': ['x']}]}".replace("'", '"').replace(": ", " = ")]


def test_a_run_resumes_without_the_directory(tmp_path: Path, corpus: Path) -> None:
    folder = directory(tmp_path / "hf")
    job = make_job(tmp_path, corpus, argument(folder), "--training.steps=2")
    train(job)
    recorded = (job.folder / "job.toml").read_text()
    assert 'name = "mistral"' in recorded
    assert "huggingface" not in recorded
    shutil.rmtree(folder)
    resumed = load_job(job.folder / "job.toml", ["--training.steps=3"])
    assert resumed.model == job.model
    train(resumed)
    assert [line["step"] for line in metrics_of(resumed)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"model_type": "gpt2"}, [], 'model_type "gpt2" is not supported (known: llama, mistral, qwen2, qwen3)'),
        ({"rope_parameters": {"rope_type": "su"}}, [], 'rope_type "su" is not supported (known: default, lin'),
        ({"head_dim": None, "num_attention_heads": 5}, [], "hidden_size = 32 is not a multiple of num_attenti"),
        ({"head_dim": 7}, [], "head_dim = 7 is odd"),
        ({"hidden_size": None}, [], "config.json has no hidden_size"),
        ({}, ["overrides = { n_layer = 3 }"], "unknown field 'n_layer'; did you mean 'n_layers'?"),
        ({}, ['flavor = "8B"'], "unknown key 'flavor'"),
    ],
    ids=str,
)
def test_a_wrong_directory_is_told_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    folder = directory(tmp_path / "hf", **changes)
    assert cli.run(["config", "debug", argument(folder, *arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--model" in error
    assert error.count("\n") == 1


def test_a_missing_directory_is_told(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read") as e:
        make_job(tmp_path, corpus, argument(tmp_path / "nowhere"))
    assert e.value.key == "model.path"
    with pytest.raises(ConfigError, match="empty; name a directory"):
        make_job(tmp_path, corpus, '--model={name = "huggingface", path = ""}')
