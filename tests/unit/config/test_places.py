"""Pins what is said of a file that is not TOML: the line, what is wrong there, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.config import toml
from titanlite.config.component import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nx = None", "2: not valid TOML: Invalid value: TOML has no None; leave the key out"),
        ("x = null  # later", "1: not valid TOML: Invalid value: TOML has no null; leave the key out"),
        ("x = .001", "1: not valid TOML: Invalid value: a number needs digits on both sides of its point"),
        ("x = .001", "its point; write x = 0.001"),
        ("x = -.5 # half", "write x = -0.5"),
        ("x = 5.", "write x = 5.0"),
        ("x = True", "1: not valid TOML: Invalid value: write x = true"),
        ("x = FALSE", "1: not valid TOML: Invalid value: write x = false"),
        ("x = llama3", '1: not valid TOML: Invalid value: a string needs quotes; write x = "llama3"'),
        ("x = /data/my corpus", 'a string needs quotes; write x = "/data/my corpus"'),
        ("[a]\nb = 1\nc = 2\nb = 3", "4: not valid TOML: a.b stands twice, first in line 2; keep one"),
        ("[a]\nb = 1\n\n[a]\nc = 2", "4: not valid TOML: a stands twice, first in line 1; keep one of them"),
        ("[a]\nx = 3,", "2: not valid TOML: Expected newline or end of document after a statement"),
        ("[[a]]\nx = 1\n[[a]]\nx = 2\nx = 3", "5: not valid TOML: a.1.x stands twice, first in line 4"),
        ("y = 1\nx = \u201cllama3\u201d", "2: not valid TOML: column 5 is a curly quote, \u201c;"),
        ("x = ['a', \u2018b\u2019]", "1: not valid TOML: column 11 is a curly quote, \u2018; write"),
        ("\u201cx\u201d = 1", "1: not valid TOML: column 1 is a curly quote"),
        ('x = "\u201ca\u201d" # "\ny = @', "2: not valid TOML: Invalid value (column 5)"),
        ('x = "llama3\u201d\ny = "b"', '1: not valid TOML: the string that begins at column 5 has no end;'),
        ('# don\'t\nx = "a" # "\ny = "b', '3: not valid TOML: the string that begins at column 5 has no end'),
        ("x = 'a\ny = 1", "that begins at column 5 has no end; close it with a straight '"),
        ("x = 'a\ny = 'b'", "1: not valid TOML: the string that begins at column 5 has no end"),
        ('x = """a\ny = "b"\n', '1: not valid TOML: the string that begins at column 5 has no end'),
        ('x = llama3"', 'Invalid value: a string needs a quote at both ends; write x = "llama3"'),
    ],
)  # fmt: skip
def test_a_syntax_error_names_the_line_and_what_to_write(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError) as e:
        toml.read(path)
    assert str(e.value).startswith(f"{path}:")
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_a_byte_order_mark_is_not_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[a]\nx = 1\n")
    assert toml.read(path)[0] == {"a": {"x": 1}}


def test_another_encoding_is_told_with_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes("[a]\n".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"cannot read the configuration: .*; save it as UTF-8"):
        toml.read(path)
