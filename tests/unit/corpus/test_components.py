"""A training job may name components of the satellite: they are registered when their names are met."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

JOB = """
    [model]
    name = "llama3"
    flavor = "debug"
    [tokenizer]
    name = "bytes"
    [[data.sources]]
    name = "chat"
    path = ["a.jsonl"]
"""


def modules_after(code: str, folder: Path) -> list[str]:
    """The modules of the satellite that a fresh interpreter has imported after `code`."""
    code += "\nimport sys; print(*(name for name in sys.modules if name.startswith('titanlite.corpus')))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_trainer_imports_the_satellite_for_its_components_only(tmp_path: Path) -> None:
    load = "from titanlite.job import load_job\nload_job({!r})"
    (tmp_path / "chat.toml").write_text(JOB)
    assert not modules_after("import titanlite.train\n" + load.format("debug"), tmp_path)
    assert "titanlite.corpus.chat_source" in modules_after(load.format("chat.toml"), tmp_path)
