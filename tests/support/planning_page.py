"""The output that docs/planning.md quotes: a block `<!-- output: NAME -->` is what `titanlite plan` prints.

`python -m tests.support.planning_page` writes the blocks into the page."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path

from titanlite import cli

PAGE = Path(__file__).resolve().parents[2] / "docs/planning.md"
BLOCK = re.compile(r"(<!-- output: (\w+) -->\n\n```\n).*?(```\n)", re.DOTALL)
COMMANDS = {
    "one": "llama3_1b --gpus 1xRTX4090",
    "eight": "llama3_1b --gpus 8xH100 --price 2.5 --top 3",
}


def refreshed(page: str) -> str:
    """The page with the output of the present program."""
    return BLOCK.sub(lambda match: f"{match[1]}{_output(COMMANDS[match[2]])}{match[3]}", page)


@functools.cache
def _output(words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.run(["plan", *words.split()]) == 0
    text = re.sub(r"^epochs .*\n", "", out.getvalue(), flags=re.MULTILINE)  # depends on the files here
    return f"$ titanlite plan {words}\n{text}"


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
