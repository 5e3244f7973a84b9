"""`[model] name = "huggingface"` takes the model's shape from the config.json of a directory. The run records
the family and its fields, and resumes without config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support.jobs import metrics_of, write_toml
from tests.support.models import SHAPE, random_net
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.job import Job, load_job
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


def job_file(folder: Path, corpus: Path, path: Path, *lines: str) -> Path:
    """The base job of the tests, with the model of the directory `path` and more lines of [model]."""
    text = write_toml(folder, corpus).read_text()
    rest = text[text.index("[tokenizer]") :]
    file = folder / "mine.toml"
    file.write_text("\n".join(["[model]", 'name = "huggingface"', f'path = "{path}"', *lines, "", rest]))
    return file


def load(folder: Path, corpus: Path, path: Path, *lines: str, overrides: Sequence[str] = ()) -> Job:
    where = [f"--job.dump_folder={folder / 'run'}", f"--data.cache_dir={corpus / 'cache'}"]
    return load_job(job_file(folder, corpus, path, *lines), [*where, *overrides])


@pytest.mark.parametrize("family", [Qwen2(flavor="0.5B"), Mistral(flavor="7B-v0.1"), Llama3(flavor="8B")])
def test_the_directory_decides_the_family(tmp_path: Path, corpus: Path, family: ModelFamily) -> None:
    job = load(tmp_path, corpus, directory(tmp_path / "hf", family))
    assert job.model == replace(family, origin=str(tmp_path / "hf"))
    job = load(tmp_path, corpus, tmp_path / "hf", overrides=["--model.overrides.n_layers=3"])
    assert job.model == replace(family, overrides={"n_layers": 3}, origin=str(tmp_path / "hf"))


def test_a_run_resumes_without_the_directory(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the recorded job.toml, which the same command names when the directory is gone."""
    folder = directory(tmp_path / "hf")
    save_file(random_net(TINY).state_dict(), folder / "model.safetensors")
    keys = ["--training.steps=2", f"--checkpoint.initial_load_path={folder}"]
    job = load(tmp_path, corpus, folder, "overrides = { max_position = 128 }", overrides=keys)
    assert job.model.config == replace(TINY.config, max_position=128)
    train(job)
    recorded = (job.folder / "job.toml").read_text()
    assert 'name = "mistral"' in recorded
    assert "huggingface" not in recorded
    shutil.rmtree(folder)
    assert cli.run(["train", str(tmp_path / "mine.toml"), f"--job.dump_folder={job.folder}"]) == 2
    error = capsys.readouterr().err
    hint = "; a run that has started does not need it: resume with titanlite train RUN/job.toml"
    assert f"{folder}/config.json cannot be read" in error
    assert error.endswith(f"{hint}\n")
    folder.mkdir()
    (folder / "config.json").write_text("[")
    with pytest.raises(ConfigError) as damaged:
        load_job(tmp_path / "mine.toml")
    assert hint not in str(damaged.value)
    resumed = load_job(job.folder / "job.toml", ["--training.steps=3"])
    assert resumed.model == job.model
    with pytest.raises(ConfigError, match=f"more than vocab_size = 258 of mistral of {folder}; for a new"):
        resumed.model.check_vocabulary(10_000)
    train(resumed)
    assert [line["step"] for line in metrics_of(resumed)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "lines", "message"),
    [
        (
            {"model_type": "gpt2"},
            [],
            'model_type "gpt2" is not supported (known: ',
        ),
        (
            {"rope_parameters": {"rope_type": "su"}},
            [],
            'rope_type "su" is not supported (known: default, lin',
        ),
        (
            {"head_dim": None, "num_attention_heads": 5},
            [],
            "hidden_size = 32 is not a multiple of num_attenti",
        ),
        ({"head_dim": 7}, [], "head_dim = 7 is odd"),
        ({"hidden_size": None}, [], "config.json has no hidden_size"),
        ({}, ["overrides = { n_layer = 3 }"], "unknown field 'n_layer'; did you mean 'n_layers'?"),
        ({}, ['flavor = "8B"'], "unknown key 'flavor'"),
    ],
    ids=str,
)
def test_a_wrong_directory_is_told_in_one_line(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    lines: list[str],
    message: str,
) -> None:
    file = job_file(tmp_path, corpus, directory(tmp_path / "hf", **changes), *lines)
    assert cli.run(["config", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"{file}:" in error
    assert error.count("\n") == 1


def test_a_missing_directory_is_told(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml:3: model\.path: .*config\.json cannot be read"):
        load(tmp_path, corpus, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model\.path: empty; name a directory"):
        load(tmp_path, corpus, tmp_path, overrides=["--model.path="])
