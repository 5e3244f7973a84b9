"""A training run loads the core only, and a satellite's component when a job names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SATELLITES = ("titanlite.contrib", "titanlite.corpus", "titanlite.lab", "titanlite.report")
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
STATEMENTS = [
    "import titanlite.train",
    "from titanlite.job import load_job; load_job('debug')",
    "load_job('chat.toml')",
    *(f"import {name}.verbs" for name in SATELLITES),
]


def loaded(statements: list[str], folder: Path) -> list[set[str]]:
    """The modules of satellites that a fresh process has loaded after each of the statements."""
    code = "import sys\n" + "".join(f"{one}\nprint(*sys.modules)\n" for one in statements)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True
    )
    prefixes = tuple(f"{name}." for name in SATELLITES)
    return [
        {name for name in line.split() if f"{name}.".startswith(prefixes)}
        for line in done.stdout.splitlines()
    ]


def test_the_trainer_loads_a_satellite_for_its_components_only(tmp_path: Path) -> None:
    (tmp_path / "chat.toml").write_text(JOB)
    trainer, job, job_with_component, *controls = loaded(STATEMENTS, tmp_path)
    assert not trainer
    assert not job
    assert "titanlite.corpus.chat_source" in job_with_component
    for name, names in zip(SATELLITES, controls):
        assert f"{name}.verbs" in names
