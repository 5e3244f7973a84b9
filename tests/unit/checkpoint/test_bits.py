"""The conditions of equal bits in manifests: those of the checkpoint from which the run continues, also if it
is not the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Toy, flip_a_shard, start_run
from tests.support.jobs import make_job
from titanlite.checkpoint import commit
from titanlite.checkpoint.bits import bits_after, changes_since
from titanlite.checkpoint.resume import Candidate
from titanlite.checkpoint.section import Checkpoint
from titanlite.log import logger
from titanlite.parallel.compile import Compile
from titanlite.runtime.runtime import runtime
from titanlite.start import bits_conditions

CONDITIONS = {"torch": "2.13.0", "device": "H100", "local_batch_size": 2, "cuda": "13.0"}


def candidate(manifest: dict[str, Any], step: int = 4) -> Candidate:
    return Candidate(step, Path(f"step-{step}"), manifest, {}, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "now", "change"),
    [
        ("torch", "2.14.0", "torch 2.13.0 -> 2.14.0"),
        ("device", "H200", "device H100 -> H200"),
        ("local_batch_size", 4, "local_batch_size 2 -> 4"),
        ("threads", 1, "threads None -> 1"),  # a condition that an earlier version did not record
    ],
)
def test_a_resume_under_other_conditions_ends_the_equality(key: str, now: Any, change: str) -> None:
    conditions = CONDITIONS | {key: now}
    assert changes_since(candidate({"bits": CONDITIONS}), conditions) == [change]
    bits = bits_after(candidate({"bits": CONDITIONS}), conditions)
    assert bits == conditions | {"ended": [f"step 4: {change}"]}
    assert bits_after(candidate({"bits": bits}, 6), conditions) == bits
    assert bits_after(candidate({"bits": bits}, 6), CONDITIONS | {key: "x"})["ended"] == [
        f"step 4: {change}",
        f"step 6: {key} {now} -> x",
    ]


def test_a_resume_under_equal_conditions_ends_nothing() -> None:
    assert bits_after(None, CONDITIONS) == CONDITIONS
    assert bits_after(candidate({"bits": CONDITIONS}), CONDITIONS) == CONDITIONS


def test_steps_without_the_key_end_the_equality() -> None:
    ended = bits_after(candidate({}), CONDITIONS)["ended"]
    assert ended == ["step 4: trained without training.same_bits_on_any_ranks"]


def test_the_conditions_name_the_software_the_device_and_the_kernels(tmp_path: Path, corpus: Path) -> None:
    keys = ["--training.same_bits_on_any_ranks", "--compile.enable", "--compile.backend=aot_eager"]
    job = make_job(tmp_path, corpus, *keys)
    assert job.compile == Compile(enable=True, backend="aot_eager")
    with runtime(job.training, job.parallelism, job.comm, tmp_path) as rt:
        conditions = bits_conditions(job, rt, "sdpa")
    assert conditions is not None
    assert {"torch", "cuda", "cpu", "device"} <= conditions.keys()
    assert conditions | {
        "dtype": "float32", "local_batch_size": 4, "compile": True, "loss_backend": "aot_eager",
        "attention": "sdpa", "activation_checkpoint": "none",
    } == conditions  # fmt: skip


def saved_bits(folder: Path) -> dict[int, list[str]]:
    """`ended` of the checkpoints by step."""
    manifests = {step: commit.read_manifest(path) for step, path in commit.list_committed(folder)}
    return {step: manifest["bits"].get("ended", []) for step, manifest in manifests.items()}


def go_on(folder: Path, to_step: int, rewind_to: int = 0, **changed: Any) -> None:
    """Start the program under CONDITIONS with changes, resume, and save every step up to `to_step`."""
    run, toy = start_run(folder, Checkpoint(interval=1), bits=CONDITIONS | changed), Toy()
    try:
        run.load(toy.state)
        if rewind_to:
            assert run.rewind(rewind_to, toy.state)
        while toy.state.step < to_step:
            toy.step()
            run.save(toy.state)
        run.close()
    finally:
        run.close_after_error()


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A run folder whose steps 3 and 4 have other conditions than steps 1 and 2."""
    go_on(tmp_path, 2)
    go_on(tmp_path, 4, local_batch_size=4)
    ended = ["step 2: local_batch_size 2 -> 4"]
    assert saved_bits(tmp_path / "checkpoint") == {1: [], 2: [], 3: ended, 4: ended}
    return tmp_path


@pytest.mark.parametrize(("size", "ended"), [(2, []), (4, ["step 2: local_batch_size 2 -> 4"])])
def test_a_fallback_takes_the_conditions_of_the_checkpoint_that_is_used(
    changed: Path, size: int, ended: list[str]
) -> None:
    """The damage of steps 3 and 4 is in their shards, which are read after the run has chosen step 4."""
    for step in (3, 4):
        flip_a_shard(changed / f"checkpoint/step-{step}")
    go_on(changed, 3, local_batch_size=size)
    assert saved_bits(changed / "checkpoint")[3] == ended


def test_the_log_has_one_line_on_changes(changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()
    monkeypatch.setattr(logger, "info", log.append)
    go_on(changed, 5, local_batch_size=4)
    assert not [line for line in log if "bits" in line]
    go_on(changed, 6, local_batch_size=8, torch="2.14.0")
    assert [line for line in log if "bits" in line] == [
        "step 5 continues under other conditions (torch 2.13.0 -> 2.14.0; local_batch_size 4 -> 8): from "
        "here on the bits differ from those of a run that was never resumed"
    ]


@pytest.mark.parametrize(("size", "ended"), [(2, []), (4, ["step 1: local_batch_size 2 -> 4"])])
def test_a_rewind_takes_the_conditions_of_the_checkpoint_to_which_it_goes(
    changed: Path, size: int, ended: list[str]
) -> None:
    go_on(changed, 2, rewind_to=1, local_batch_size=size)
    assert saved_bits(changed / "checkpoint") == {1: [], 2: ended}
