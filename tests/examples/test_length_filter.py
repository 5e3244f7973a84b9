"""The example of a filter: `titanlite prepare` runs it by its name, in several processes, and reports it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.length_filter import LineLength
from titanlite.config.component import ConfigError
from titanlite.corpus import prepare
from titanlite.data.shards import TokenShards

CONFIG = """
imports = ["tests.examples.length_filter"]

[tokenizer]
name = "bytes"

[[filters]]
name = "line_length"
max_characters = 20
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_prepare_removes_long_lines(tmp_path: Path, num_processes: int) -> None:
    texts = ["short\nlines", "x" * 20, "x" * 21, "a short line\n" + "y" * 30, "z\n" * 50]
    for name in ("a", "b"):  # two splits, so that two processes have work
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    (tmp_path / "prepare.toml").write_text(CONFIG)
    arguments = ["prepare.toml", "a.jsonl", "b.jsonl", f"--num_processes={num_processes}"]
    arguments = [str(tmp_path / word) if not word.startswith("--") else word for word in arguments]
    assert prepare.main([*arguments, f"--output={tmp_path / 'out'}"]) == 0
    shards = TokenShards(tmp_path / "out")
    kept = {bytes(shards.document(i)[1:-1].tolist()).decode() for i in range(shards.num_documents)}
    assert kept == {texts[0], texts[1], texts[4]}
    (entry,) = json.loads((tmp_path / "out/report.json").read_text())["filters"]
    assert (entry["name"], entry["documents"]) == ("line_length", 4)
    assert {sample["reason"] for sample in entry["samples"]} == {
        "a line of 21 characters, more than 20",
        "a line of 30 characters, more than 20",
    }


def test_it_checks_its_keys() -> None:
    with pytest.raises(ConfigError, match="0 is below 1"):
        LineLength(max_characters=0)
