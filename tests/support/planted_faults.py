"""Plants mistakes in a copy of the tree, one at a time, and runs the tests of the changed code: a mistake
that no test of the default tier finds is a hole in the tests.

    python -m tests.support.planted_faults                  all of planted_faults.toml
    python -m tests.support.planted_faults --only NAME      those with NAME in their name or file; repeatable
    python -m tests.support.planted_faults --all-tests      each against the whole default tier
    python -m tests.support.planted_faults --json FILE      also write the results there

The tests first run without a fault, and have to pass. The exit code is 1 if they do not, or if a fault is not
found, and 2 if the list does not fit the tree.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 900  # of the tests of one fault
PASSED, FAILED = 0, 1  # pytest's exit codes; the others say that it could not run the tests


@dataclass(frozen=True)
class Fault:
    """A replacement of `old` by `new` in one file of the package. `kind`: the kind of mistake. `tests`: the
    test files of the changed code."""

    name: str
    file: str
    kind: str
    old: str
    new: str
    tests: Sequence[str]

    def planted_in(self, root: Path) -> str:
        """The content of the file with the fault. Raises ValueError unless `old` stands there once."""
        content = (root / self.file).read_text(encoding="utf-8")
        if (count := content.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text stands {count} times in {self.file}, not once")
        return content.replace(self.old, self.new)


class Result(NamedTuple):
    """The result for a fault. `by`: the first failed test, or the reason why the tests could not run."""

    outcome: str
    by: str
    seconds: float


def load_faults() -> list[Fault]:
    """The faults of planted_faults.toml, in their order."""
    return [Fault(**entry) for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["fault"]]


def misfits(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """Descriptions of the faults that do not fit the tree."""
    problems = []
    for fault in faults:
        try:
            compile(fault.planted_in(root), fault.file, "exec")
        except (ValueError, OSError, SyntaxError) as e:
            problems.append(str(e))
        missing = [test for test in fault.tests if not (root / test).exists()]
        problems += [f"{fault.name}: there is no {test}" for test in missing]
    return problems


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks, as they are now, and new files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """Plant the fault in the copy at `root` during the body."""
    file = root / fault.file
    before = file.read_text(encoding="utf-8")
    file.write_text(fault.planted_in(root), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def run_tests(root: Path, tests: Sequence[str]) -> Result:
    """Run the default tier's tests in these files until the first one fails; without files, run all tests."""
    # no bytecode: that of a fault would pass for its file's if both are written in one second
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    try:
        run = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Result("NOT FOUND", f"the tests did not end in {TIMEOUT_S} s", time.monotonic() - began)
    seconds = time.monotonic() - began
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", run.stdout, re.MULTILINE)
    if run.returncode == FAILED and failed:
        return Result("found", failed[1], seconds)
    if run.returncode == PASSED:
        return Result("NOT FOUND", "", seconds)
    return Result("NO RESULT", (run.stdout + run.stderr).strip()[-500:], seconds)


def chosen(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    """The faults whose name or file contains one of `only`; all faults if `only` is empty."""
    return [f for f in faults if not only or any(part in f.name or part in f.file for part in only)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.planted_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--all-tests", action="store_true")
    parser.add_argument(
        "--no-control", action="store_true", help="do not run the tests without a fault first"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    faults = chosen(load_faults(), options.only)
    if not faults:
        parser.error(f"no fault in {FILE.name} has {' or '.join(options.only)} in its name or file")
    if problems := misfits(faults):
        print("\n".join(problems), file=sys.stderr)
        return 2
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        root = Path(folder)
        copy_tree(root)
        if not options.no_control:
            tests = [] if options.all_tests else sorted({test for fault in faults for test in fault.tests})
            control = run_tests(root, tests)
            passed = control.outcome == "NOT FOUND" and not control.by
            print(
                f"without a fault: {'passed' if passed else control.by} ({control.seconds:.0f} s)", flush=True
            )
            if not passed:
                return 1
        for fault in faults:
            with planted(fault, root):
                results[fault.name] = result = run_tests(root, [] if options.all_tests else fault.tests)
            print(f"{result.outcome:9}  {fault.name:55}  {result.by}  ({result.seconds:.0f} s)", flush=True)
    num_found = sum(result.outcome == "found" for result in results.values())
    print(f"{num_found} of {len(faults)} faults were found")
    if options.json:
        table = [{**asdict(fault), **results[fault.name]._asdict()} for fault in faults]
        options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0 if num_found == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
