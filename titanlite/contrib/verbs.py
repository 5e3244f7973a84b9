"""The verbs `migrate` and `tasks` of the command line. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from titanlite.commands import Verb
from titanlite.options import Options


def add_migrate(options: Options) -> None:
    options.add("source", type=Path, help="a TOML file of torchtitan 0.1 or 0.2, or the JSON of 0.3")
    options.add("-o", "--output", type=Path, help="the file to write (standard output)")


VERBS = {
    "migrate": Verb(
        "titanlite.contrib.migrate", "translate a configuration of torchtitan", options=add_migrate
    ),
    "tasks": Verb("titanlite.contrib.import_tasks", "make tasks to score from files of benchmarks"),
}
