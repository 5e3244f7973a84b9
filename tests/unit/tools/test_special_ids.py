"""The ids that end a text, and the defaults of sampling, survive from a Hugging Face directory over titanlite
to an export, and `titanlite generate` stops at each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import make_job, write_toml
from tests.support.models import VARIANTS, family, hugging_face, keys_of
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.tools.generate import open_source
from titanlite.train import train

transformers = pytest.importorskip("transformers")
MODEL = family(**VARIANTS["scaled rope"])
GENERATION = {
    "bos_token_id": 256, "eos_token_id": [257, 65], "pad_token_id": 0, "do_sample": True, "temperature": 0.6,
    "top_p": 0.9, "transformers_version": "4.42.3",
}  # fmt: skip
IDS = {"bos_token_id": 256, "eos_token_id": [257, 65], "pad_token_id": 0}


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}))


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def ids_in(folder: Path) -> dict[str, Any]:
    return {key: read(folder / "config.json").get(key) for key in IDS}


def tokenizer_in(folder: Path, **configured: Any) -> Path:
    """Raw bytes as a tokenizer.json."""
    folder.mkdir(exist_ok=True)
    for name, content in Bytes().build().hugging_face_files().items():
        (folder / name).write_bytes(content)
    edit(folder / "tokenizer_config.json", **configured)
    return folder


@pytest.fixture
def instruct(tmp_path: Path) -> Path:
    """A directory as Llama 3.1 Instruct's: several ids end a text, and it says how to sample."""
    hugging_face(MODEL).save_pretrained(tmp_path / "instruct")
    edit(tmp_path / "instruct/config.json", **IDS)
    (tmp_path / "instruct/generation_config.json").write_text(json.dumps(GENERATION))
    return tokenizer_in(tmp_path / "instruct")


def ends(path: Path) -> set[int]:
    return open_source(path, torch.device("cpu"), allow_imports=False).stop_ids


def test_they_survive_an_import(instruct: Path, tmp_path: Path, corpus: Path) -> None:
    target, config = tmp_path / "it", write_toml(tmp_path, corpus)
    keys = [*keys_of(MODEL), f"--tokenizer={{name = 'huggingface', path = '{instruct}'}}"]
    assert cli.run(["import", str(instruct), str(target), str(config), *keys]) == 0
    assert read(target / "generation_config.json") == GENERATION
    assert ids_in(target) == IDS
    assert transformers.GenerationConfig.from_pretrained(target).eos_token_id == [257, 65]
    assert transformers.AutoConfig.from_pretrained(target).pad_token_id == 0
    assert ends(target) == {257, 65}


def test_they_survive_a_run(instruct: Path, tmp_path: Path, corpus: Path) -> None:
    job = make_job(
        tmp_path, corpus, *keys_of(MODEL), f"--tokenizer={{name = 'huggingface', path = '{instruct}'}}",
        f"--checkpoint.initial_load_path={instruct}", "--training.steps=1",
    )  # fmt: skip
    train(job)
    assert cli.run(["export", str(job.folder), str(tmp_path / "it")]) == 0
    assert read(tmp_path / "it/generation_config.json") == GENERATION
    assert ids_in(tmp_path / "it") == IDS
    assert ends(job.folder) == {257, 65}


def test_the_end_of_a_document_is_always_among_them(instruct: Path) -> None:
    tokenizer = HuggingFace(path=str(instruct), eos="<|begin_of_text|>").build()
    assert tokenizer.model_ids()["eos_token_id"] == [256, 257, 65]
    assert tokenizer.stop_ids == {256, 257, 65}


def test_a_tokenizer_without_bos_gives_no_bos_id(tmp_path: Path, corpus: Path) -> None:
    """Its documents begin with EOS; that is no BOS for anybody else."""
    folder = tokenizer_in(tmp_path / "qwen", bos_token=None)
    hugging_face(MODEL).save_pretrained(tmp_path / "source")
    (tmp_path / "source/generation_config.json").unlink()
    config = write_toml(tmp_path, corpus)
    keys = [*keys_of(MODEL), f"--tokenizer={{name = 'huggingface', path = '{folder}'}}"]
    assert cli.run(["import", str(tmp_path / "source"), str(tmp_path / "it"), str(config), *keys]) == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "it").bos_token_id is None
    assert read(tmp_path / "it/generation_config.json") == {"eos_token_id": 257}


def test_ids_that_are_none_are_told(instruct: Path) -> None:
    edit(instruct / "generation_config.json", eos_token_id=["</s>"])
    with pytest.raises(
        ConfigError, match=r"generation_config.json: eos_token_id is \['</s>'\], neither an id"
    ):
        HuggingFace(path=str(instruct)).build()


def test_what_another_tokenizer_leaves_behind_is_told(
    instruct: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, config = tmp_path / "it", write_toml(tmp_path, corpus)
    assert cli.run(["import", str(instruct), str(target), str(config), *keys_of(MODEL)]) == 0
    said = capsys.readouterr().err
    edit(instruct / "generation_config.json", output_attentions=False)  # as transformers has it anyway
    lost = "exports will have other values of eos_token_id, pad_token_id, do_sample, temperature"
    assert f"{instruct}/generation_config.json: {lost}" in said
    assert f"--tokenizer.name=huggingface --tokenizer.path={instruct}" in said
    assert "output_attentions" not in said
