"""Records the log that the README quotes: `./run_train.sh debug` with an empty cache.

    python benchmarks/readme_log.py            # about a minute and a half on two cores

Writes benchmarks/results/readme_debug.log and puts its excerpt into README.md.
tests/test_end_to_end.py compares the excerpt with the program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402

LOG, README = ROOT / "benchmarks/results/readme_debug.log", ROOT / "README.md"
BLOCK = re.compile(r"(?<=```\n)\[rank0\].*?(?=```)", re.DOTALL)
QUOTED = re.compile(r"debug: .* parameters$|sequences per step|step +(1|160)/|saved .*/step-160 ")


def main() -> None:
    """Run, write the log, and update the README."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [str(ROOT / "run_train.sh"), "debug"]
        env = os.environ | {"PYTHON": sys.executable}
        done = subprocess.run(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - began
    about = environment("torch")
    head = f"# ./run_train.sh debug with an empty cache: {seconds:.0f} s. " + ", ".join(
        f"{key} {value}" for key, value in about.items()
    )
    LOG.write_text(f"{head}\n{done.stderr}", encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(BLOCK.sub(lambda _: excerpt(done.stderr), readme, count=1), encoding="utf-8")
    print(head)


def excerpt(log: str) -> str:
    """Return the lines that the README quotes; `...` stands for lines that are left out."""
    all_lines = log.splitlines()
    first = next(
        i for i, line in enumerate(all_lines) if line.startswith("[rank0]")
    )  # after tokenising's progress
    lines = [line if QUOTED.search(line) else "..." for line in all_lines[first:]]
    while lines[-1] == "...":
        lines.pop()
    quoted = [line for line, before in zip(lines, ["", *lines]) if (line, before) != ("...", "...")]
    return "".join(f"{line}\n" for line in quoted)


def quoted_lines() -> list[str]:
    """Return the lines of the log in the README."""
    block = BLOCK.search(README.read_text(encoding="utf-8"))
    assert block is not None, "README.md quotes no log"
    return [line for line in block[0].splitlines() if line != "..."]


def shape(line: str) -> str:
    """Return a log line without its numbers, and without the share of time spent waiting for data, which not
    every run logs."""
    line = re.sub(r"  waiting for data [\d.]+%", "", line)
    line = re.sub(r"python_stdlib-[0-9a-f]+", "python_stdlib", line)
    return re.sub(r" +", " ", re.sub(r"\d[\d.,:]*(e[+-]\d+)?", "N", line))


if __name__ == "__main__":
    main()
