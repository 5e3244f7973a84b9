"""Pins what is said of a file that is not TOML: the line, and what is wrong there."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.locator import Locator

VALUE = "Invalid value (column 5); strings need straight quotes, write true, 0.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nx = None", f":2: not valid TOML: {VALUE}"),
        ("x = .001", f":1: not valid TOML: {VALUE}"),
        ("x = True", f":1: not valid TOML: {VALUE}"),
        ("x = llama3", f":1: not valid TOML: {VALUE}"),
        ("y = 1\nx = \u201cllama3\u201d", f":2: not valid TOML: {VALUE}"),
        (
            "[a]\nb = 1\nc = 2\nb = 3",
            ":4: not valid TOML: Cannot overwrite a value (column 6); b is set twice",
        ),
        ("[a.b]\nx = 1\n[a.b]", ":3: not valid TOML: Cannot declare [a.b] twice (column 5)"),
        ("[a]\nx = 3,", ":2: not valid TOML: Expected newline or end of document after a statement"),
        ('x = """a\ny = "b"\n', ": not valid TOML: "),
    ],
)
def test_a_syntax_error_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError) as e:
        toml.read(path)
    assert str(e.value).startswith(f"{path}{message}")
    assert "\n" not in str(e.value)


def test_a_file_that_is_no_toml_file_at_all_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "my.tiktoken"
    path.write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ConfigError, match=r"is it a TOML file\? Its name does not end in .toml$"):
        toml.read(path)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("dim = -64 is not above 0", "command line, --model.overrides.dim"),
        ("n_heads = 3 is not a multiple of dim = 2", "command line, --model.overrides.dim"),
        ("n_heads = 3 is odd", "job.toml:1: model"),
        ("dimmer = 3 is odd", "job.toml:1: model"),
    ],
)
def test_a_value_that_the_command_line_sets_is_not_blamed_on_the_file(message: str, place: str) -> None:
    locator = Locator("job.toml", "[model]\noverrides.n_heads = 3\n")
    locator.overridden.add("model.overrides.dim")
    assert str(locator.located(ConfigError(message, "model"))) == f"{place}: {message}"


def test_a_byte_order_mark_is_not_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[a]\nx = 1\n")
    assert toml.read(path)[0] == {"a": {"x": 1}}


def test_another_encoding_is_told_with_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes("[a]\n".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"cannot read the configuration: .*; save it as UTF-8"):
        toml.read(path)
