"""How long the commands of CONTRIBUTING.md's table take, and how many tests the README says there are: from
benchmarks/results/test_suite_2_cores.json.

    python -m tests.support.suite_times             write the times into the two pages
    python -m tests.support.suite_times --measure   first run every command of the table, on an idle machine

All times in the table are of the day of the default tier's: commands that were not measured on that
day, such as those that need a GPU, are called unmeasured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/test_suite_2_cores.json"
TABLE, README = ROOT / "CONTRIBUTING.md", ROOT / "README.md"
ROW = re.compile(r"^(\| .* \| `(pytest[^`]*)` \| )(?!wall)(.*)( \|)$", re.MULTILINE)
DAY = re.compile(r"(on two idle cores on )[\d-]+")
SENTENCE = re.compile(r"runs the [\d,]+ tests of the default tier in .* on two cores")
DEFAULT_TIER = "pytest -n 2"


def in_words(seconds: float) -> str:
    """A time to the second, such as 3 min 36 s."""
    minutes, rest = divmod(round(seconds), 60)
    return " ".join(filter(None, [f"{minutes} min" * bool(minutes), f"{rest} s" * bool(rest)])) or "0 s"


def with_times(table: str, results: dict[str, Any]) -> str:
    """CONTRIBUTING.md with the times of the last measurement, and its day."""
    day = day_of(results[DEFAULT_TIER])

    def measured(row: re.Match[str]) -> str:
        result = results.get(row[2])
        is_of_day = result is not None and day_of(result) == day
        return f"{row[1]}{in_words(result['wall_s']) if is_of_day else 'unmeasured'}{row[4]}"

    return DAY.sub(rf"\g<1>{day}", ROW.sub(measured, table))


def day_of(result: dict[str, Any]) -> str:
    return result["environment"]["time"][:10]


def with_count(readme: str, results: dict[str, Any]) -> str:
    """README.md with the number of tests of the default tier, in hundreds, and their time."""
    result = results[DEFAULT_TIER]
    count, wall = result["passed"] // 100 * 100, in_words(result["wall_s"])
    return SENTENCE.sub(f"runs the {count:,} tests of the default tier in {wall} on two cores", readme)


def measure(commands: list[str]) -> None:
    """Run the commands and add their results to the file."""
    for command in commands:
        script = [sys.executable, "benchmarks/suite.py", "--output", str(RESULTS), "--", *command.split()]
        subprocess.run(script, cwd=ROOT, check=True)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--measure"]):
        sys.exit("usage: python -m tests.support.suite_times [--measure]")
    before = TABLE.read_text(encoding="utf-8")
    if sys.argv[1:]:
        measure([row[2] for row in ROW.finditer(before) if "gpu" not in row[2]])
    known = json.loads(RESULTS.read_text(encoding="utf-8"))
    TABLE.write_text(with_times(before, known), encoding="utf-8")
    README.write_text(with_count(README.read_text(encoding="utf-8"), known), encoding="utf-8")
