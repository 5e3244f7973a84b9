"""The comparison of two runs on a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.curves import falling, noise_like, write_run
from titanlite.checkpoint import commit
from titanlite.cli import run
from titanlite.report.compare import comparison
from titanlite.report.page import report
from titanlite.report.recorded_run import names_of, read_run
from titanlite.table import table

JOB = '[optimizer]\nname = "adamw"\nlr = {}\n[[data.sources]]\nname = "tokens"\nweight = {}\n'


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    loss = falling(400) + 0.02 * noise_like("normal", 400, 0)
    other = falling(400) + 0.02 * noise_like("normal", 400, 1) - 0.1
    return [
        write_run(
            tmp_path / "a", {"train/loss": loss, "time/step_s": np.full(400, 1.0)}, job=JOB.format(1, 2)
        ),
        write_run(
            tmp_path / "b", {"train/loss": other, "time/step_s": np.full(400, 1.5)}, job=JOB.format(3, 2)
        ),
    ]


def test_verdicts_losses_times_and_keys(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", *map(str, folders)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "b against a" in lines
    assert any(line.startswith("  lower: b ends with a loss that is lower by 0.") for line in lines)
    assert ["training", "6.7", "min", "(100.0%)", "10.0", "min", "(100.0%)"] in [
        line.split() for line in lines
    ]
    assert [line.split() for line in lines if line.startswith("optimizer.lr")] == [["optimizer.lr", "1", "3"]]
    assert not any("weight" in line for line in lines)
    assert any("the median of the logged losses around it" in line for line in lines)
    (row,) = [line.split() for line in lines if line.startswith("40M")]  # 400 steps of 100,000 tokens
    assert float(row[3]) == pytest.approx(-0.1, abs=0.02)
    assert float(row[2]) - float(row[1]) == pytest.approx(float(row[3]), abs=1e-3)


def test_a_run_against_itself_ties(folders: list[Path]) -> None:
    same = [folders[0], folders[0]]
    out = comparison([read_run(folder, name) for folder, name in zip(same, names_of(same))])
    assert "end with the same loss" in out
    assert "No key differs." in out


def test_problems_and_short_runs_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "progress/total_tokens": 1}\nx\x1b[31m\n')
    out = comparison([read_run(tmp_path / name, name) for name in ("a", "b")])
    assert "a: metrics.jsonl: damaged records are left out, in 1 line: 2" in out
    assert "Keys that differ are not known" in out
    assert "\x1b" not in out


def test_skipped_steps_are_one_to_a_line(folders: list[Path]) -> None:
    skipped = [{"step": step, "event": "skipped", "loss": step} for step in (7, 9)]
    (folders[0] / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in skipped))
    runs = [read_run(folder, folder.name) for folder in folders]
    lines = comparison(runs).splitlines()
    at = lines.index("  skipped steps: 2 steps skipped")
    assert lines[at + 1 : at + 3] == [f"      skipped, step {n}: loss {n}" for n in (7, 9)]
    assert "skipped, step 7: loss 7<br>skipped, step 9: loss 9<" in report(runs)


def with_digests(folder: Path, digests: list[str | None]) -> Path:
    return write_run(folder, {"train/loss": falling(len(digests)), "train/weights_digest": digests})


def with_checkpoint(folder: Path, step: int, digest: object) -> None:
    """Save a checkpoint without tensors."""
    (folder / "checkpoint").mkdir(exist_ok=True)
    partial = commit.begin(folder / "checkpoint", step)
    commit.commit(partial, step, {}, {}, {"saved_at": "", "ranks": 1, "digest": digest})


def weights_of(first: Path, other: Path) -> list[str]:
    lines = comparison([read_run(folder, folder.name) for folder in (first, other)]).splitlines()
    return [line.strip() for line in lines if "weights" in line or "digests" in line]


def test_the_first_step_with_other_weights_is_named(tmp_path: Path) -> None:
    first = with_digests(tmp_path / "a", ["1", "2", "3", None])
    equal = with_digests(tmp_path / "b", ["1", "2", None, "4"])
    later = with_digests(tmp_path / "c", ["1", "5", "3"])
    other = with_digests(tmp_path / "d", ["0", "2", "3"])
    assert weights_of(first, equal) == ["weights: equal at all 2 steps with digests in both, up to step 2"]
    assert weights_of(first, later) == [
        "weights: the digests differ at step 2, the first with digests in both that differ; equal at the one "
        "step before, up to step 1"
    ]
    assert weights_of(first, other) == [
        "weights: the digests differ at step 1, the first with digests in both that differ"
    ]
    assert "the digests differ at step 2, the first" in report([read_run(p, p.name) for p in (first, later)])


def test_weights_of_checkpoints_are_compared(tmp_path: Path) -> None:
    first, other = (with_digests(tmp_path / name, ["1", None, None]) for name in "ab")
    for folder, digest in ((first, "3"), (other, "4")):
        with_checkpoint(folder, 2, {"weights": "2", "state": digest})
        with_checkpoint(folder, 3, {"weights": digest})
    assert weights_of(first, other) == [
        "weights: the digests differ at step 3, the first with digests in both that differ; equal at all 2 "
        "steps before, up to step 2"
    ]


def test_without_digests_of_the_same_steps_nothing_is_said_of_weights(tmp_path: Path) -> None:
    first, later = with_digests(tmp_path / "a", ["1", None]), with_digests(tmp_path / "b", [None, "1"])
    with_checkpoint(later, 1, ["edited"])
    assert weights_of(first, later) == []


def test_one_run_is_refused(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", str(folders[0])]) == 2
    assert "at least two runs" in capsys.readouterr().err


def test_names_are_short_and_different() -> None:
    assert names_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names_of([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert len(set(names_of([Path("/x/a"), Path("/x/a")]))) == 2


def test_columns_are_aligned_and_long_cells_cut() -> None:
    lines = table([["", "first", "second"], ["key", "v" * 100, "w\nx"]]).splitlines()
    assert lines[0].index("second") == lines[1].index("w x")
    assert len(lines[1]) < 80
