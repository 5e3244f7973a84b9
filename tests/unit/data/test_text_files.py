"""Pins the way from text files to shards: which files a path means, what is a document, and that a broken
input is an error naming file and place after which nothing half-written remains, whether a source or
`titanlite prepare` read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.config.component import ConfigError
from titanlite.corpus import pipeline, prepare
from titanlite.data import tokenize_files
from titanlite.data.shards import TokenShards
from titanlite.data.text_files import documents
from titanlite.data.text_formats import find_files
from titanlite.data.text_sources import Text
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.tiktoken import Tiktoken

ROOT = Path(__file__).resolve().parents[3]
BOS, EOS = 256, 257

Reader = Callable[..., TokenShards]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without worker processes, which take longer to start than the files to read; test_pipeline.py has
    several."""
    monkeypatch.setattr(pipeline, "num_cores", lambda: 1)
    monkeypatch.setattr(tokenize_files, "num_cores", lambda: 1)


def by_source(folder: Path, *inputs: str, field: str = "text") -> TokenShards:
    """Into a cache in folder/out."""
    return Text(path=list(inputs), field=field).build(Bytes().build(), folder / "out")


def by_prepare(folder: Path, *inputs: str, field: str = "text") -> TokenShards:
    """Into folder/out/shards."""
    output = folder / "out" / "shards"
    arguments = [*inputs, "--output", str(output), "--field", field, "--tokenizer.name=bytes"]
    assert prepare.main(arguments) == 0
    return TokenShards(output)


@pytest.fixture(params=[by_source, by_prepare], ids=["source", "prepare"])
def read(request: pytest.FixtureRequest) -> Reader:
    """Each of the two ways that text becomes shards."""
    return request.param


def texts(shards: TokenShards) -> list[str]:
    """The documents of raw-bytes shards, sorted (they were shuffled), their frames checked and taken off."""
    result = []
    for i in range(shards.num_documents):
        ids = shards.document(i).tolist()
        assert (ids[0], ids[-1]) == (BOS, EOS)
        result.append(bytes(ids[1:-1]).decode())
    return sorted(result)


def test_any_file_is_one_document_and_a_jsonl_line_is_one(tmp_path: Path, read: Reader) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "three"}\n\n  \n{"id": 4, "text": "caf\\u00e9"}\n{"text": "no newline"}'
    )
    (tmp_path / "c.md").write_text("named, so read")
    shards = read(tmp_path, *(str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.md")))
    assert texts(shards) == ["caf\u00e9", "named, so read", "no newline", "one\n\ntwo\n", "three"]


def test_text_is_kept_to_the_byte(tmp_path: Path, read: Reader) -> None:
    text = "cr\ufeff\r\nlf\n\ttab \u2028 \u4f60\u597d \U0001f600\x00 end  "
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode())
    assert texts(read(tmp_path, str(tmp_path))) == [text, text]


def test_empty_documents_are_left_out(tmp_path: Path, read: Reader) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    assert texts(read(tmp_path, str(tmp_path))) == ["x"]


def test_another_field(tmp_path: Path, read: Reader) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert texts(read(tmp_path, str(tmp_path / "a.jsonl"), field="body")) == ["yes"]


def test_both_ways_give_the_same_shards(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(700)))
    inputs = [str(tmp_path / "*.txt"), str(tmp_path / "b.jsonl")]
    source, prepared = by_source(tmp_path, *inputs), by_prepare(tmp_path, *inputs)
    assert source.fingerprint == prepared.fingerprint
    assert source.num_documents == 701


def test_prepare_reports_and_reads_tokenizer_overrides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    path = str(ROOT / "assets/tokenizer/stdlib.tiktoken")
    argv = [str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), f"--tokenizer.path={path}"]
    assert prepare.main(argv) == 0
    shards, tokenizer = TokenShards(tmp_path / "out"), Tiktoken(path=path).build()
    assert shards.document(0).tolist() == [tokenizer.bos, *tokenizer.encode("hello world"), tokenizer.eos]
    assert shards.tokenizer_fingerprint == tokenizer.fingerprint
    assert f"1 documents, {shards.num_tokens} tokens" in capsys.readouterr().out


def test_prepare_refuses_an_existing_output(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        prepare.main([str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer.name=bytes"])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of several kinds in several folders."""
    for name in ("b.txt", "a.jsonl", "notes.md", "deep/er/c.txt", "deep/d.jsonl", "deep/e.bin"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)
    (tmp_path / "tree" / "folder.txt").mkdir()
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["."], ["a.jsonl", "b.txt", "deep/d.jsonl", "deep/er/c.txt"]),
        (["deep"], ["deep/d.jsonl", "deep/er/c.txt"]),
        (["*.txt"], ["b.txt"]),
        (["**/*.txt"], ["b.txt", "deep/er/c.txt"]),
        (["[ab].*"], ["a.jsonl", "b.txt"]),
        (["notes.md", "deep/e.bin"], ["deep/e.bin", "notes.md"]),
        (["b.txt", ".", "*.txt", "deep"], ["a.jsonl", "b.txt", "deep/d.jsonl", "deep/er/c.txt"]),
    ],
)
def test_paths_directories_and_globs(tree: Path, patterns: list[str], names: list[str]) -> None:
    """Sorted, and each file once however often it is named."""
    result = find_files([str(tree) if p == "." else f"{tree}/{p}" for p in patterns], "key")
    assert [f.resolve().relative_to(tree.resolve()).as_posix() for f in result] == names


def test_relative_and_absolute_names_of_a_file_are_one(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert len(find_files(["b.txt", "./b.txt", str(tree / "b.txt")], "key")) == 1


def test_directories_are_read_through_links_but_not_hidden_ones(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "top [1]").mkdir()
    (tmp_path / "top [1]" / "link").symlink_to(tree / "deep")
    (tmp_path / "top [1]" / ".hidden").mkdir()
    (tmp_path / "top [1]" / ".hidden" / "x.txt").write_text("x")
    result = find_files([str(tmp_path / "top [1]")], "key")
    assert [f.name for f in result] == ["d.jsonl", "c.txt"]


def test_a_directory_of_json_files_is_read(tmp_path: Path) -> None:
    """As C4 lies on the hub: `c4-train.00000-of-01024.json.gz`; torchtitan's test data is a `data.json`."""
    import gzip

    (tmp_path / "c4").mkdir()
    with gzip.open(tmp_path / "c4/c4-train.00000-of-00001.json.gz", "wt") as f:
        f.write('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "c4/data.json").write_text('{"text": "three"}\n')
    (tmp_path / "c4/dataset_info.json").write_text('{"about": "the dataset"}')  # Hugging Face's, not text
    assert by_source(tmp_path, str(tmp_path / "c4")).num_documents == 3


def test_a_directory_without_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_text("x")
    with pytest.raises(ConfigError, match=r"no text files in '.*pictures'; of a directory, \.txt") as e:
        find_files([str(tmp_path / "pictures")], "data.sources.path")
    assert e.value.key == "data.sources.path"


def test_a_path_with_glob_characters_is_first_a_path(tmp_path: Path) -> None:
    file = tmp_path / "corpus [v2].txt"
    file.write_text("x")
    assert find_files([str(file)], "key") == [file]


def assert_nothing_written(folder: Path) -> None:
    """Unfinished work may be kept, under a name that nothing takes for a dataset."""
    result = list((folder / "out").glob("*")) + list((folder / "out").glob("**/dataset.json"))
    assert all(p.name.startswith(".partial-") for p in result)


@pytest.mark.parametrize("missing", ["nowhere.txt", "nowhere", "no*.jsonl"])
def test_a_missing_file(tmp_path: Path, read: Reader, missing: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError) as e:
        read(tmp_path, str(tmp_path / "a.txt"), str(tmp_path / missing))
    assert missing in str(e.value)
    assert_nothing_written(tmp_path)


def test_a_missing_relative_file_says_relative_to_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as e:
        find_files(["data/a.txt"], "data.sources.path")
    assert "'data/a.txt'" in str(e.value)
    assert str(Path.cwd()) in str(e.value)
    assert e.value.key == "data.sources.path"


@pytest.mark.parametrize("name", ["gone.txt", "gone.jsonl"])
def test_a_file_that_vanished_meanwhile(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        list(documents([tmp_path / name], "text"))


@pytest.mark.parametrize(
    "files",
    [{}, {"a.txt": ""}, {"a.jsonl": "\n \n"}, {"a.jsonl": '{"text": ""}\n', "b.txt": ""}, {"a.md": "x"}],
)
def test_an_empty_corpus(tmp_path: Path, read: Reader, files: dict[str, str]) -> None:
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_text(content)
    with pytest.raises(ConfigError, match="empty"):
        read(tmp_path, str(tmp_path / "in"))
    assert_nothing_written(tmp_path)


BROKEN = {
    "text not UTF-8": ("z.txt", b"fine \xff not", ["z.txt", "not UTF-8", "byte 5"]),
    "text cut within a character": ("z.txt", b"caf\xc3", ["z.txt", "not UTF-8", "byte 3"]),
    "UTF-16": ("z.txt", "text".encode("utf-16"), ["z.txt", "not UTF-8", "byte 0"]),
    "line not UTF-8": (
        "z.jsonl",
        b'{"text": "x"}\n{"text": "\xe9"}\n',
        ["z.jsonl:2:", "not UTF-8", "byte 10"],
    ),
    "line cut": ("z.jsonl", b'{"text": "x"}\n\n{"text": "y', ["z.jsonl:3:", "not valid JSON"]),
    "two objects on a line": ("z.jsonl", b'{"text": "x"} {"text": "y"}\n', ["z.jsonl:1:", "not valid JSON"]),
    "no field": ("z.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', ["z.jsonl:2:", "no field 'text'"]),
    "a list": ("z.jsonl", b'["text"]\n', ["z.jsonl:1:", "a JSON array"]),
    "a raw newline": ("z.jsonl", b'{"text": "a\n"}\n', ["Invalid control character at character 12"]),
    "a string": ("z.jsonl", b'"text"\n', ["z.jsonl:1:", "no field 'text'"]),
    "a null line": ("z.jsonl", b"null\n", ["z.jsonl:1:", "no field 'text'"]),
    "field is a number": (
        "z.jsonl",
        b'{"text": "x"}\n{"text": 3}\n',
        ["z.jsonl:2:", "'text' is not a string"],
    ),
    "field is null": ("z.jsonl", b'{"text": null}\n', ["z.jsonl:1:", "'text' is not a string"]),
    "field is a list": ("z.jsonl", b'{"text": ["x"]}\n', ["z.jsonl:1:", "'text' is not a string"]),
    "half a character, escaped": ("z.jsonl", b'{"text": "x"}\n{"text": "\\ud83d"}\n', ["z.jsonl:2:"]),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.filterwarnings("error")
def test_broken_input_is_named_and_nothing_remains(tmp_path: Path, read: Reader, case: str) -> None:
    """The broken file comes last, after more good documents than are tokenised at once."""
    name, content, named = BROKEN[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "good"}\n' * 600)
    assert read(tmp_path / "control", str(tmp_path / "in")).num_documents == 600
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(ConfigError) as e:
        read(tmp_path, str(tmp_path / "in"))
    for part in (str(tmp_path / "in" / name), *named):
        assert part in str(e.value)
    assert_nothing_written(tmp_path)


def test_half_a_character_is_never_patched(tmp_path: Path) -> None:
    """A tokenizer that would replace it does not get to see it."""
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud83d y"}\n')
    tokenizer = Tiktoken(path=str(ROOT / "assets/tokenizer/stdlib.tiktoken")).build()
    with pytest.raises(ConfigError, match=r"a\.jsonl:1"):
        Text(path=[str(tmp_path / "a.jsonl")]).build(tokenizer, tmp_path / "out")
    assert_nothing_written(tmp_path)
