"""What tests rely on: ranks that answer, fail and end as they should, and the limit of the CPU time."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import ranks
from tests.support.jobs import ROOT
from tests.support.tiers import in_part, part

COLLECT = [sys.executable, "-m", "pytest", "--collect-only", str(ROOT / "tests/test_architecture.py")]
SUITE = [sys.executable, str(ROOT / "benchmarks" / "suite.py")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answer(offset: int) -> tuple[int, int]:
    return dist.get_rank() + offset, dist.get_world_size()


def test_results_come_by_rank_from_one_process_group() -> None:
    assert ranks.run(3, answer, 10) == [(10, 3), (11, 3), (12, 3)]


def preloaded() -> bool:
    return "tests.support.preload" in sys.modules


def test_no_rank_has_to_import_titanlite() -> None:
    """The fork server passes over a module that it cannot import."""
    assert ranks.run(1, preloaded) == [True]


def environment() -> str:
    return os.environ["COLOUR"]


def test_ranks_have_the_environment_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for colour in ("red", "blue"):
        monkeypatch.setenv("COLOUR", colour)
        assert ranks.run(1, environment) == [colour]


def fail_on_one(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("this rank only")
    dist.barrier()  # would wait for ever


def test_a_rank_that_fails_ends_all_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*ValueError: this rank only"):
        ranks.run(2, fail_on_one, tmp_path)
    assert not any(alive(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 0 died with exit code -9"):
        ranks.run(1, die)


def crash_once(folder: Path) -> None:
    """Crash the first time that it is called on rank 0. Rank 1 raises what a lost peer raises."""
    if dist.get_rank() == 1:
        dist.barrier()
    elif not (folder / "crashed").exists():
        (folder / "crashed").touch()
        os.abort()
    else:
        dist.barrier()


def test_a_crash_in_native_code_is_named_whichever_rank_fails_first(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 has crashed in native code: SIGABRT"):
        ranks.run(2, crash_once, tmp_path)
    ranks.run(2, crash_once, tmp_path)


RERUN = """
from pathlib import Path

def test_once_more():
    count = Path({count!r})
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    assert len(count.read_text()) == {passing}, "rank 0 {end}"
"""


@pytest.mark.parametrize(
    ("passing", "end", "outcome"),
    [
        (2, "has crashed in native code: SIGABRT", "1 passed, 1 rerun"),
        (3, "has crashed in native code: SIGABRT", "1 failed, 1 rerun"),
        (2, "died with exit code -9", "1 failed"),
    ],
)
def test_only_a_crash_in_native_code_is_run_once_more(
    tmp_path: Path, passing: int, end: str, outcome: str
) -> None:
    test = tmp_path / "test_rerun.py"
    test.write_text(RERUN.format(count=str(tmp_path / "count"), passing=passing, end=end))
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"-c{ROOT / 'pyproject.toml'}",
        "-pno:cacheprovider",
        str(test),
    ]
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    assert re.search(rf"^{outcome} in ", output, re.MULTILINE), output


def wait_for_ever() -> None:
    time.sleep(1000)


def test_a_rank_that_does_not_answer_is_named() -> None:
    with pytest.raises(AssertionError, match=r"no answer from ranks \[0\]"):
        ranks.Ranks(1, wait_for_ever).results(timeout_s=0.2)


def leave_with_its_number() -> None:
    if dist.get_rank() == 0:
        ranks.leave(7)
    wait_for_ever()


def test_when_one_rank_fails_its_peers_get_sigterm() -> None:
    group = ranks.Ranks(2, leave_with_its_number)
    assert group.exits(signal_peers=True) == [7, -signal.SIGTERM]


def test_a_rank_that_should_have_ended_its_process_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 0 did not end its process: None"):
        ranks.Ranks(1, print).exits()


@pytest.mark.skipif(sys.platform != "linux", reason="the script reads /proc")
@pytest.mark.parametrize(("limit", "code"), [("0.02", 1), ("60", 0)])
def test_the_limit_of_cpu_time_counts_orphans(limit: str, code: int) -> None:
    orphan = f"{shlex.quote(sys.executable)} -S -c 'sum(range(10**7))' &"
    run = subprocess.run(
        [*SUITE, f"--max-cpu-seconds={limit}", "--", "sh", "-c", orphan],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == code, run.stderr
    assert ("are allowed" in run.stderr) == bool(code)


def test_each_test_is_in_one_part() -> None:
    tests = [f"tests/test_it.py::test_it[{number}]" for number in range(1000)]
    sizes = [sum(in_part(test, k, 4) for test in tests) for k in (1, 2, 3, 4)]
    assert sum(sizes) == 1000
    assert min(sizes) > 200


def test_parts_that_are_collected_are_disjoint_and_complete() -> None:
    def collected(*options: str) -> list[str]:
        done = subprocess.run([*COLLECT, *options], capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if "::" in line]

    first, second = collected("--part=1/2"), collected("--part=2/2")
    assert first
    assert second
    assert sorted(first + second) == sorted(collected())


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "1/4/5"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        part(text)
    assert part("4/4") == (4, 4)


def test_a_mistake_in_the_part_is_a_usage_error() -> None:
    done = subprocess.run([*COLLECT, "--part=5/4"], capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "argument --part: invalid part value: '5/4'" in done.stderr
