"""titanlite tasks import FORMAT SOURCE [-o FOLDER] [--limit N] [--imports MODULE]

Write files for `[[validation.tasks]]` (docs/tasks.md): NAME.jsonl of each task, and tasks.toml with their
tables. FOLDER: a new folder (tasks/NAME, named as SOURCE). --limit: questions of each task (-1: all).

core: SOURCE is the folder of CORE's extracted evaluation bundle. Examples, order and prompts are nanochat's.
arc, piqa, hellaswag, lambada, winogrande, boolq: SOURCE is a .jsonl file as published. Prompts are those of
lm-evaluation-harness. --task: name of the task (the file's). --shots: examples in front of each question (0).
--examples: file to choose them from (the other questions). --seed: of the choice (1234).

--imports: module that registers further formats (docs/extending.md#task-importer); its code is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

import titanlite.contrib.core_bundle
import titanlite.contrib.task_formats  # noqa: F401
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import import_components
from titanlite.config.locator import Locator
from titanlite.config.overrides import Bare, plain_value, split_words
from titanlite.config.paths import check_new, expand_home
from titanlite.config.schema import convert, describe
from titanlite.contrib.task_importer import TaskFile, TaskImporter
from titanlite.files import new_folder
from titanlite.progress import Progress
from titanlite.tasks.task import Task


def main(argv: Sequence[str]) -> int:
    """Import tasks, and print how to use them."""
    action, *rest = argv
    if action != "import":
        raise ConfigError(f"unknown action {action!r}{suggest(action, ['import'])}")
    rest = ["--output" if word == "-o" else re.sub("^-o", "--output=", word) for word in rest]
    words, options = split_words(rest)
    tree, locator = toml.read(None, options)
    output, imports = tree.pop("output", None), plain_value(tree.pop("imports", []))
    if isinstance(output, Bare) or output == "":
        raise ConfigError("command line, --output: name a new folder")
    import_components({"imports": [imports] if isinstance(imports, str) else imports}, locator, allowed=True)
    if len(words) != 2:
        raise ConfigError(
            f"expected FORMAT SOURCE{suggest('', TaskImporter.choices)}; see `titanlite tasks --help`"
        )
    source = Path(expand_home(words[1]))
    folder = Path(expand_home(output)) if output else Path("tasks") / source.stem
    importer = make_importer(words[0], tree, locator)
    check_new(folder, "--output")
    tables = dict[str, dict[str, Any]]()
    with new_folder(folder) as partial:
        files = importer.build(source)
        for file in Progress(iterable=files, desc="importing", unit=" tasks", delay=2, leave=False):
            if file.name in tables:
                raise ConfigError(f"{source} has two tasks with the name {file.name!r}")
            tables[file.name] = write(file, partial, folder)
        if not tables:
            raise ConfigError(f"{source} has no tasks")
        # Not one table [validation], which the configuration may have already.
        text = "\n".join(f"[[validation.tasks]]\n{tomli_w.dumps(table)}" for table in tables.values())
        (partial / "tasks.toml").write_text(text, encoding="utf-8")
    num = "1 task" if len(tables) == 1 else f"{len(tables)} tasks"
    print(f"{folder}: {num}; to score: cat {folder}/tasks.toml >> CONFIG.toml, and --validation.enable")
    return 0


def make_importer(name: str, tree: dict[str, Any], locator: Locator) -> TaskImporter:
    """Return the importer of a format with these options. Raises ConfigError."""
    if name not in TaskImporter.choices:
        raise ConfigError(f"unknown format {name!r}{suggest(name, TaskImporter.choices)}")
    cls: Any = TaskImporter.choices[name]
    options, errors = convert(describe(cls), tree, locator=locator)
    if errors:
        raise locator.all_located(errors)
    try:
        return cls(**options)
    except ConfigError as e:
        raise locator.located(e) from None


def write(file: TaskFile, folder: Path, final: Path) -> dict[str, Any]:
    """Write the file of a task into `folder`, which will become `final`. Returns the task's table. Raises
    ConfigError for keys that a validation would refuse."""
    table = {"name": file.name, "path": str(final / f"{file.name}.jsonl"), **file.keys}
    Task(**table)
    with open(folder / f"{file.name}.jsonl", "x", encoding="utf-8") as out:
        out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in file.lines)
    return table
