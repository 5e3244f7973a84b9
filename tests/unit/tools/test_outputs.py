"""Every verb that works for long first finds out whether it can write its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite import cli
from titanlite.contrib import migrate
from titanlite.corpus import make_tokenizer as tokenizer
from titanlite.corpus import prepare
from titanlite.tools import export, import_weights


def fail(*args: object, **kwargs: object) -> None:
    raise AssertionError("the work has begun")


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Starts in tmp_path, where there are a text and a folder, and does not survive what takes long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    (tmp_path / "run").mkdir()
    for module, name in (
        (export, "find_checkpoint"), (import_weights, "open_weights"), (migrate, "migrate"),
        (prepare, "prepare"), (tokenizer, "train_bpe"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fail)


VERBS = {
    "export": ["export", "run", "OUT"],
    "import": ["import", "run", "OUT", "debug"],
    "migrate": ["migrate", "torchtitan.toml", "-o", "OUT"],
    "prepare": ["prepare", "text.txt", "--output=OUT"],
    "tokenizer": ["tokenizer", "train", "text.txt", "--output", "OUT"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_an_output_that_cannot_be_made_is_refused_before_the_work(
    verb, no_work, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n")
    (tmp_path / "file").write_text("")
    assert cli.run([word.replace("OUT", "file/out") for word in VERBS[verb]]) == 2
    assert "file is not a writable directory" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_an_output_that_is_there_is_refused_before_the_work(verb, no_work, tmp_path, capsys):
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").write_text("somebody's work")
    for there in ("a folder", "a file"):
        assert cli.run([word.replace("OUT", there) for word in VERBS[verb]]) == 2
        assert f"{there} exists; choose another, or delete it" in capsys.readouterr().err


# A tokenizer is one file, which replaces the link and does not follow it.
LINKS = [(verb, output) for verb in VERBS for output in ("link", "link/out")]
LINKS.remove(("tokenizer", "link"))


@pytest.mark.parametrize(("verb", "output"), LINKS)
def test_a_link_that_leads_nowhere_is_refused_before_the_work(verb, output, no_work, tmp_path, capsys):
    (tmp_path / "link").symlink_to("nowhere")
    assert cli.run([word.replace("OUT", output) for word in VERBS[verb]]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "link exists; choose another" in said or "link is a link that leads nowhere" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "run", "text.txt"]


def test_a_tokenizer_is_written_into_a_new_folder(tmp_path: Path, capsys) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "new" / "folder" / "mine.tiktoken"
    text.write_text("a few words, and a few words again\n" * 9)
    arguments = ["tokenizer", "train", str(text), "--vocab-size", "260", "--output", str(output)]
    assert cli.run(arguments) == 0
    assert len(output.read_text().splitlines()) == 260
    before = output.read_bytes()
    assert cli.run([*arguments, "--vocab-size", "270"]) == 2
    assert output.read_bytes() == before
    assert [p.name for p in output.parent.iterdir()] == ["mine.tiktoken"]
