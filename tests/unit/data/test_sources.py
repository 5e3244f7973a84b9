"""Pins what a source of data is keyed and checked by: the cache of raw text knows content, tokenizer and the
way of reading, so old tokens are never met and good ones never made twice; shards of another tokenizer and
weights that are none are refused; python_stdlib is the library's own source and nothing else."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.datasets import FakeTokenizer, write_dataset
from tests.support.megatron_files import write_megatron
from titanlite.config.component import ConfigError
from titanlite.corpus.megatron import Megatron
from titanlite.data import tokenize_files
from titanlite.data.dataset import Data
from titanlite.data.shards import TokenShards
from titanlite.data.sources import Source, Tokens, short_names
from titanlite.data.text_sources import PythonStdlib, Text, stdlib_files
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.bytes import Bytes


class Shifted(Tokenizer):
    """A tokenizer that counts the documents that it encodes."""

    vocab_size, bos, eos, fingerprint = 300, 256, 257, "shifted"

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return [b ^ 1 for b in text.encode()]


def tokens_of(shards: TokenShards) -> list[int]:
    return shards.read(0, shards.num_tokens).tolist()


def documents_of(shards: TokenShards) -> list[list[int]]:
    """All documents, in an order that does not depend on the shuffle."""
    return sorted(shards.document(i).tolist() for i in range(shards.num_documents))


def framed(*texts: str) -> list[int]:
    """The tokens of documents with the bytes tokenizer."""
    return [t for text in texts for t in (256, *text.encode(), 257)]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """The inode and the modification time of every file."""
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob("*")}


def test_unchanged_text_is_not_tokenised_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    tokenizer, source, cache = Shifted(), Text(path=[str(tmp_path / "a.txt")]), tmp_path / "cache"
    first = source.build(tokenizer, cache)
    assert tokenizer.encoded == 1
    before = snapshot(cache)
    again = source.build(tokenizer, cache)
    assert tokenizer.encoded == 1
    assert snapshot(cache) == before
    assert tokens_of(again) == tokens_of(first)
    assert again.path == first.path


def test_an_edited_file_gives_new_tokens(tmp_path: Path) -> None:
    """Even if size and modification time are equal."""
    file, cache, tokenizer = tmp_path / "a.txt", tmp_path / "cache", Bytes().build()
    source = Text(path=[str(file)])
    file.write_text("hello")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    old = source.build(tokenizer, cache)
    file.write_text("jello")
    os.utime(file, ns=times)
    new = source.build(tokenizer, cache)
    assert tokens_of(new) == framed("jello")
    assert new.path != old.path
    file.write_text("hello")
    assert source.build(tokenizer, cache).path == old.path


def test_a_file_more_or_less_gives_new_tokens(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source, tokenizer = Text(path=[str(tmp_path / "in")]), Bytes().build()
    (tmp_path / "in" / "a.txt").write_text("ab")
    assert tokens_of(source.build(tokenizer, tmp_path / "cache")) == framed("ab")
    (tmp_path / "in" / "b.txt").write_text("cd")
    assert documents_of(source.build(tokenizer, tmp_path / "cache")) == [framed("ab"), framed("cd")]
    (tmp_path / "in" / "a.txt").write_text("abcd")  # the same bytes in one file
    (tmp_path / "in" / "b.txt").unlink()
    assert tokens_of(source.build(tokenizer, tmp_path / "cache")) == framed("abcd")


def test_another_tokenizer_has_another_directory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    source, cache = Text(path=[str(tmp_path / "a.txt")]), tmp_path / "cache"
    plain, shifted = source.build(Bytes().build(), cache), source.build(Shifted(), cache)
    assert plain.path != shifted.path
    assert plain.path.parent == shifted.path.parent == cache
    assert tokens_of(plain) == framed("hello")
    assert tokens_of(shifted) == [256, *(b ^ 1 for b in b"hello"), 257]


def test_another_field_gives_other_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "body": "two"}\n')
    path, tokenizer = [str(tmp_path / "a.jsonl")], Bytes().build()
    assert tokens_of(Text(path=path).build(tokenizer, tmp_path / "cache")) == framed("one")
    assert tokens_of(Text(path=path, field="body").build(tokenizer, tmp_path / "cache")) == framed("two")


def test_another_way_of_reading_gives_other_tokens(tmp_path: Path) -> None:
    """The same bytes in a .txt and a .jsonl file are different documents."""
    content, tokenizer = '{"text": "one"}\n', Bytes().build()
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text(content)
    as_text = Text(path=[str(tmp_path / "a.txt")]).build(tokenizer, tmp_path / "cache")
    assert tokens_of(as_text) == framed(content)
    as_lines = Text(path=[str(tmp_path / "a.jsonl")]).build(tokenizer, tmp_path / "cache")
    assert tokens_of(as_lines) == framed("one")


def test_a_damaged_cache_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    source, tokenizer = Text(path=[str(tmp_path / "a.txt")]), Bytes().build()
    file = source.build(tokenizer, tmp_path / "cache").path / "00000.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"00000\.bin"):
        source.build(tokenizer, tmp_path / "cache")


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    tokenizer = Bytes().build()
    write_dataset(tmp_path / "d", [framed("hello")], tokenizer)
    source = Tokens(path=str(tmp_path / "d"))
    assert tokens_of(source.build(tokenizer, tmp_path)) == framed("hello")
    with pytest.raises(ConfigError) as e:
        source.build(Shifted(), tmp_path)
    for part in (str(tmp_path / "d"), tokenizer.fingerprint, "shifted"):
        assert part in str(e.value)


@pytest.mark.parametrize("weight", [-1, -0.5, 2e9, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["tokens", "text", "python_stdlib"])
def test_a_weight_that_is_no_share_is_refused(kind: str, weight: float) -> None:
    options: dict[str, Any] = {"tokens": {"path": "d"}, "text": {"path": ["a"]}, "python_stdlib": {}}[kind]
    choice = Source.choices[kind]
    choice(**options, weight=1e-3)
    choice(**options, weight=0.0)  # for a source that only stages read
    with pytest.raises(ConfigError, match=r"is not in \[0, 1e9\]") as e:
        choice(**options, weight=weight)
    assert e.value.key == "weight"


def test_the_standard_library_is_there_without_tests_and_packages() -> None:
    files, root = stdlib_files(), Path(sysconfig.get_paths()["stdlib"])
    names = [f.relative_to(root).as_posix() for f in files]
    assert {"os.py", "json/decoder.py", "collections/__init__.py"} <= set(names)
    assert names == sorted(names)
    assert len(files) > 300
    for name in names:
        assert name.endswith(".py")
        parts = set(name.split("/"))
        assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def fake_library(root: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})


def test_which_files_are_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders above the library may have any name. A file in another encoding is skipped."""
    root = tmp_path / "test" / "lib"
    names = ("b.py", "a/z.py", "a/b.pyc", "test/t.py", "a/tests/t.py", "testing.py")
    files = dict.fromkeys(names, b"x = 1\n")
    files |= {"site-packages/p.py": b"", "latin.py": b"# coding: latin-1\n# \xe9\n", "a/idle_test/i.py": b""}
    fake_library(root, monkeypatch, files)
    assert [f.relative_to(root).as_posix() for f in stdlib_files()] == ["a/z.py", "b.py", "testing.py"]


def test_a_python_without_source_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_library(tmp_path, monkeypatch, {"os.pyc": b""})
    with pytest.raises(ConfigError, match="python_stdlib"):
        stdlib_files()


def test_python_stdlib_is_cached_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, cache, tokenizer = tmp_path / "lib", tmp_path / "cache", Bytes().build()
    fake_library(library, monkeypatch, {"a.py": b"a = 1", "b.py": b"b = 2"})
    first = PythonStdlib().build(tokenizer, cache)
    assert documents_of(first) == [framed("a = 1"), framed("b = 2")]
    before = snapshot(cache)
    assert PythonStdlib().build(tokenizer, cache).path == first.path
    assert snapshot(cache) == before
    (library / "a.py").write_text("a = 3")
    assert documents_of(PythonStdlib().build(tokenizer, cache)) == sorted([framed("a = 3"), framed("b = 2")])


def test_the_cache_is_read_only_when_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed while it tokenises leaves no directory that a later run would use as its cache."""
    (tmp_path / "a.txt").write_text("hello")
    source, cache, tokenizer = Text(path=[str(tmp_path / "a.txt")]), tmp_path / "cache", Bytes().build()

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenize_files, "write_description", killed)
        with pytest.raises(KeyboardInterrupt):
            source.build(tokenizer, cache)
    assert not list(cache.iterdir())
    assert tokens_of(source.build(tokenizer, cache)) == framed("hello")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/web", "data/code"], ["web", "code"]),
        (["web/train", "code/train", "books"], ["web_train", "code_train", "books"]),
        (["/a/x/train", "/b/x/train/"], ["a_x_train", "b_x_train"]),
        ([["data/a b.jsonl", "data/c"], "data/d\x1b[0m\u00e9.txt"], ["a_b.jsonl", "d__0m_.txt"]),
        (["x", "x", "x-2", "x"], ["x", "x-2", "x-2-2", "x-3"]),
    ],
)
def test_short_names_are_different_and_printable(paths: list[Any], names: list[str]) -> None:
    assert short_names([Text(path=path) for path in paths]) == names
    assert short_names([PythonStdlib()]) == ["python_stdlib"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Tokens(path="nope"), "nope/dataset.json: No such file or directory; expected a directory made by"),
        (Tokens(path="a.txt"), 'a.txt is a file, not a dataset: the source name = "text" reads texts'),
        (Text(path=["a.txt"]), "a.txt: not UTF-8 at byte 0"),
    ],
)
def test_an_error_of_a_source_has_the_place_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as e:
        Data(sources=[source], cache_dir="cache").build(Bytes().build(), seq_len=8, seed=0)
    assert str(e.value).startswith(message)
    assert e.value.key == "data.sources.0"


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("text", "chunk"),
        ("text", "best_fit"),
        ("megatron", "chunk"),
        ("tokens", "best_fit"),
        ("tokens", "chunk"),
    ],
)
def test_a_complete_cache_may_be_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, packing: Any
) -> None:
    (tmp_path / "a.txt").write_text("some text" * 9)
    write_dataset(tmp_path / "d", [[1] * 40], FakeTokenizer(258, Bytes().build().fingerprint))
    source = {
        "text": Text(path=[str(tmp_path / "a.txt")]),
        "megatron": Megatron(path=[write_megatron(tmp_path / "m", [[[1] * 40]])]),
        "tokens": Tokens(path=str(tmp_path / "d")),
    }[name]

    def sequences_with(cache: str) -> Any:
        data = Data(sources=[source], packing=packing, cache_dir=str(tmp_path / cache))
        return data.build(Bytes().build(), seq_len=8, seed=0)

    made = sequences_with("cache")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert sequences_with("cache").identity == made.identity
    if (name, packing) == ("tokens", "chunk"):
        assert sequences_with("nowhere").identity == made.identity  # the cache is not used
    else:
        with pytest.raises(ConfigError, match=r"empty cannot be written: .* not a writable directory") as e:
            sequences_with("empty")
        assert e.value.key == "data.cache_dir"
        assert not (tmp_path / "empty").exists()
