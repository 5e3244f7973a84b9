"""Models, tokenizers and datasets that somebody has crafted, or that are damaged: one line and exit code 2 or
3, in a second; nothing hangs, and no file from elsewhere gets into an export."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.kinds import WRONG_KINDS
from tests.support.models import family, random_net
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.contrib.meta_weights import open_meta
from titanlite.data.shards import TokenShards, write_description, write_shard
from titanlite.interop.weights import check
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.tools.generate import open_source

pytestmark = pytest.mark.usefixtures("no_hang")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Hugging Face directory."""
    folder, model_family = tmp_path / "model", family(tie_word_embeddings=False)
    folder.mkdir()
    save_file(random_net(model_family).state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Bytes().build()
    files = {"config.json": json.dumps({**model_family.hf_config(), "eos_token_id": tokenizer.eos}).encode()}
    files["generation_config.json"] = json.dumps({"eos_token_id": [tokenizer.eos, 65]}).encode()
    for name, content in {**files, **tokenizer.hugging_face_files()}.items():
        (folder / name).write_bytes(content)
    return folder


def generate(folder: Path) -> int:
    return cli.run(["generate", str(folder), "--prompt=a", "--max-new-tokens=1"])


def assert_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """One line, in a second or two; the message."""
    began = time.process_time()
    assert generate(folder) in (2, 3)
    assert time.process_time() - began < 10
    err = capsys.readouterr().err
    assert err.startswith("titanlite: "), err
    assert err.count("\n") == 1, err
    return err


def test_control_the_directory_is_fine(directory: Path) -> None:
    assert generate(directory) == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["a named pipe", "/dev/zero", "a link to itself"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ],
)
def test_only_regular_files_are_read(
    directory: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    make, message = WRONG_KINDS[kind]
    (directory / name).unlink()
    make(directory / name)
    said = assert_refused(directory, capsys)
    assert message in said or kind == "a link to itself", said


def set_in(file: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tree = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**tree, **values}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(set_in("config.json", num_hidden_layers=10**n) for n in (2, 5, 9, 18, 30)),
        *(set_in("config.json", hidden_size=n) for n in (1 << 31, 1 << 63, -1, "x", [])),
        *(set_in("config.json", vocab_size=n) for n in (1 << 40, 1 << 63)),
        set_in("config.json", num_attention_heads=1 << 30, head_dim=1 << 30, hidden_size=1 << 30),
        set_in("generation_config.json", eos_token_id=[[1]]),
        set_in("generation_config.json", eos_token_id={"a": 1}),
        lambda folder: (folder / "config.json").write_text("[" * 100_000) and None,
        lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000) and None,
    ],
)
def test_a_configuration_is_compared_before_a_model_is_built(
    directory: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    change(directory)
    assert_refused(directory, capsys)


def test_too_many_layers_are_named(directory: Path) -> None:
    set_in("config.json", num_hidden_layers=10**6)(directory)
    with pytest.raises(ConfigError, match=r"has 21 tensors, too few for a model of 1000000 layers"):
        open_source(directory, torch.device("cpu"), False)


# ---- what an export would copy


def tokenizer_in(folder: Path) -> Path:
    """A tokenizer's folder."""
    folder.mkdir(parents=True)
    for name, content in Bytes().build().hugging_face_files().items():
        (folder / name).write_bytes(content)
    return folder


def test_a_link_out_of_a_tokenizers_folder_is_not_copied(tmp_path: Path) -> None:
    folder = tokenizer_in(tmp_path / "tokenizer")
    (tmp_path / "secret").write_text('{"password": "x"}')
    tokenizer = HuggingFace(path=str(folder)).build()
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
        with pytest.raises(
            ConfigError, match=f"{name} is a link to {tmp_path / 'secret'}, outside its folder"
        ):
            tokenizer.hugging_face_files()
        (folder / name).unlink()
    (folder / "template").write_text("{{ x }}")
    (folder / "chat_template.jinja").symlink_to("template")
    assert tokenizer.hugging_face_files()["chat_template.jinja"] == b"{{ x }}"


def test_links_of_hugging_faces_cache_are_followed(tmp_path: Path) -> None:
    folder = tokenizer_in(tmp_path / "models--x/snapshots/1234")
    (tmp_path / "models--x/blobs").mkdir()
    (tmp_path / "models--x/blobs/abcd").write_text("{{ x }}")
    (folder / "chat_template.jinja").symlink_to("../../blobs/abcd")
    tokenizer = HuggingFace(path=str(folder)).build()
    assert tokenizer.hugging_face_files()["chat_template.jinja"] == b"{{ x }}"


# ---- Meta's files


@pytest.mark.parametrize(
    "content",
    [
        {"tok_embeddings.weight": torch.ones(())},
        {"layers.0.attention.wq.weight": torch.ones(())},
        {"tok_embeddings.weight": torch.ones(8)},
        {3: torch.ones(2, 2)},
        [torch.ones(2)],
        {},
    ],
)
def test_a_crafted_file_of_metas_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "consolidated.00.pth")
    with pytest.raises(ConfigError):
        check(open_meta(tmp_path, family()), family())


# ---- datasets


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    entry = write_shard(folder, "00000", [np.arange(10)], np.dtype("<u2"))
    write_description(folder, Bytes().build(), [entry], {})
    TokenShards(folder)
    return folder


def shard(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda tree: tree["shards"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shard(name="a\0b"), r"'a\\x00b' is not a valid name of a shard"),
        (shard(name="../../etc/passwd"), "is not a valid name of a shard"),
        (shard(name=3), "name is 3, not a string"),
        (shard(bin_sha256=5), "bin_sha256 is 5, not a string"),
        (shard(tokens="x"), "tokens is 'x', not an integer"),
        (shard(tokens=-10), "has a count below 0"),
        (lambda tree: tree.update(shards="x"), "shards is 'x', not a list"),
        (lambda tree: tree.update(shards=[3]), "3 is not an object"),
        (lambda tree: tree.update(prepared=3), "`prepared` is not an object"),
        (lambda tree: tree.update(dtype=[1]), "dtype is"),
        (lambda tree: tree.pop("tokenizer"), "tokenizer is missing"),
    ],
)
def test_a_crafted_dataset_is_refused(
    dataset: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], Any],
    message: str,
) -> None:
    tree = json.loads((dataset / "dataset.json").read_text())
    change(tree)
    (dataset / "dataset.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=f"dataset.json.*{message}"):
        TokenShards(dataset)
    assert cli.run(["data", "verify", str(dataset)]) == 2
    assert "Traceback" not in capsys.readouterr().err
