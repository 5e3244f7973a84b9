"""Pins `titanlite prepare`'s command line: file and overrides, filters of one's own, workers, wrong words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from titanlite.config.component import ConfigError
from titanlite.corpus import prepare
from titanlite.data.shards import TokenShards

OWN_FILTER = """
from dataclasses import dataclass
from titanlite.corpus.filters import Filter

@dataclass(frozen=True, kw_only=True)
class Without(Filter, name="without"):
    "Removes documents that hold a word."

    word: str = ""

    def build(self):
        return lambda text: f"holds {self.word!r}" if self.word in text else None
"""


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i}", "body": "b"}) + "\n" for i in range(20)))
    return file


def run(*argv: object) -> int:
    return prepare.main([*map(str, argv), "--tokenizer.name=bytes"])


def test_a_file_and_overrides(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "p.toml"
    config.write_text(
        f'output = "{tmp_path}/a"\nfield = "body"\n[[filters]]\nname = "length"\nmin_words = 2\n'
    )
    assert run(config, raw, "--filters.0.min_words=1") == 0
    assert TokenShards(tmp_path / "a").num_documents == 20
    summary = capsys.readouterr().out
    assert "20 documents" in summary
    assert summary.endswith(" characters per token), tokenizer bytes\n")
    assert run(config, raw, "--field", "text", f"--output={tmp_path / 'b'}", "--num_processes=1") == 0
    assert TokenShards(tmp_path / "b").num_documents == 20
    with pytest.raises(ConfigError, match="filters removed all"):
        run(config, raw, f"--output={tmp_path / 'c'}")


def test_a_filter_of_ones_own(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_filters.py").write_text(OWN_FILTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tmp_path / "p.toml"
    config.write_text('imports = ["own_filters"]\n[[filters]]\nname = "without"\nword = "7"\n')
    assert run(config, raw, f"--output={tmp_path / 'out'}", "--allow-imports") == 0  # which changes nothing
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (entry,) = report["filters"]
    assert (entry["name"], entry["documents"]) == ("without", 2)
    assert entry["samples"][0]["reason"] == "holds '7'"
    sys.modules.pop("own_filters")


def test_more_workers_than_work(raw: Path, tmp_path: Path) -> None:
    """The first may complete it all; to the others that is no error."""
    output = tmp_path / "workers"
    for i in range(3):
        assert run(raw, f"--output={output}", f"--worker={i}/3") == 0
    assert TokenShards(output).num_documents == 20
    with pytest.raises(ConfigError, match="exists"):  # but another options's dataset is not theirs
        run(raw, f"--output={output}", "--worker=1/3", "--seed=1")
    with pytest.raises(ConfigError, match="exists"):
        run(raw, f"--output={output}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker=2/2"], r"^command line, --worker: '2/2' is not I/N"),
        (["--worker=1"], r"worker: '1' is not I/N"),
        (["--worker=a/b"], r"not I/N"),
        (["--num_processes=-1"], r"num_processes: -1 is below 0"),
        (["--bad_lines=drop"], r"bad_lines: 'drop' is not allowed.*skip"),
        (["--sed=1"], r"unknown key 'sed'; did you mean 'seed'"),
        (["--filters.0.name=lenght"], r"did you mean 'length'"),
        (["--tokenizer.path=nowhere", "--tokenizer.name=tiktoken"], r"tokenizer\.path"),
        (['--imports=["no_such_module"]'], r"imports: cannot import 'no_such_module'"),
        (["--tokenizer=my.tiktoken"], r"got 'my\.tiktoken'; write tokenizer\.path=my\.tiktoken$"),
        (["--tokenizer=bytes"], r"got 'bytes'; write tokenizer\.name=bytes$"),
        (["--field=txt"], r"in\.jsonl:1: no field 'txt'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_word(raw: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare.main([str(raw), f"--output={tmp_path / 'out'}", "--tokenizer.name=bytes", *arguments])
    assert not (tmp_path / "out").exists()


def test_without_input_or_output(raw: Path) -> None:
    with pytest.raises(ConfigError, match="name at least one file"):
        run("--output=x")
    with pytest.raises(ConfigError, match="--output=DIR"):
        run(raw)
