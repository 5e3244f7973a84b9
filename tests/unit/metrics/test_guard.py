"""Steps that are not finite, in one process: a bad step changes nothing, a run that diverges ends with its
own exit code, and its good checkpoints stay. tests/distributed/test_guard.py has the layouts."""

from __future__ import annotations

import errno
import json
import math
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.checkpoints import GUARD, archived
from tests.support.jobs import make_job, metrics_of
from tests.support.non_finite import FAULTS, bad_steps
from titanlite import cli
from titanlite.checkpoint import checkpointer, commit
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.state import non_finite
from titanlite.errors import Diverged
from titanlite.job import Job
from titanlite.mesh import Mesh
from titanlite.metrics.guard import Guard, StepGuard
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer, guarded_step
from titanlite.parallel.clip import clip_divisor
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.run import Run
from titanlite.train import train

CPU, GOOD = torch.device("cpu"), torch.tensor(0.0)
NUM_TARGETS = torch.tensor(16)
EVERY = ["--checkpoint.interval=1", "--checkpoint.async_mode=disabled"]


def files_of(job: Job, step: int) -> dict[str, bytes]:
    """The shards of a checkpoint: weights and optimizer state."""
    return {p.name: p.read_bytes() for p in (job.folder / f"checkpoint/step-{step}").glob("*.distcp")}


def saved_steps(job: Job) -> list[int]:
    return [step for step, _ in commit.list_committed(job.folder / "checkpoint")]


# ---- decisions


def judged(guard: StepGuard, *losses: float) -> list[bool]:
    """Whether each step is applied. A step with a loss of 0 has no target."""
    norm = torch.tensor(1.0)
    return [
        bool(guard.judge(torch.tensor(x), norm, [GOOD], step, 0, 8, NUM_TARGETS * (x != 0)))
        for step, x in enumerate(losses, 1)
    ]


def test_a_step_is_applied_only_if_loss_and_norms_are_finite() -> None:
    for loss, bad_norms, wanted in [
        (1.0, 0.0, True),
        (math.nan, 0.0, False),
        (math.inf, 0.0, False),
        (1.0, 1.0, False),
    ]:
        apply = StepGuard(Guard(), CPU).judge(
            torch.tensor(loss), torch.tensor(1.0), [torch.tensor(bad_norms)], 1, 0, 8, NUM_TARGETS
        )
        assert bool(apply) is wanted


def test_a_step_without_a_target_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    guard = StepGuard(Guard(max_consecutive=3), CPU)
    assert judged(guard, 1.0, 0.0, math.nan, 0.0, math.nan, 0.0) == [True] + 5 * [False]
    with caplog.at_level("INFO", "titanlite"):
        events = guard.read()
    assert [event.step for event in events] == [3, 5]
    assert guard.skipped_steps() == 2
    assert guard.in_streak()
    told = [record.message for record in caplog.records if "no target" in record.message]
    assert told == ["step 2 has no target that counts and changes nothing; later such steps are not logged"]
    not_finite = guard.judge(torch.tensor(0.0), torch.tensor(math.nan), [1 - GOOD], 7, 0, 8, 0 * NUM_TARGETS)
    assert not not_finite
    guard.read()
    assert guard.diverged
    assert "3 steps in a row, 3 to 7," in guard.reason()


def test_no_update_is_applied_after_the_limit() -> None:
    guard = StepGuard(Guard(max_consecutive=2), CPU)
    assert judged(guard, 1.0, math.nan, 1.0, math.nan, math.inf, 1.0) == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    guard.read(leave=2)
    assert not guard.diverged
    guard.read(leave=1)
    assert guard.diverged
    assert "2 steps in a row, 4 to 5, had a loss or gradient norm that is not finite" in guard.reason()


def test_without_skipping_the_first_such_step_ends_the_run() -> None:
    guard = StepGuard(Guard(skip_non_finite=False), CPU)
    assert judged(guard, 1.0, math.nan, 1.0) == [True, False, False]
    guard.read()
    assert guard.diverged
    assert "step 2 had" in guard.reason()


def test_a_guard_goes_on_from_its_state() -> None:
    guard, other = StepGuard(Guard(max_consecutive=3), CPU), StepGuard(Guard(max_consecutive=3), CPU)
    judged(guard, math.nan, 1.0, math.nan, math.nan)
    other.load_state_dict(guard.state_dict())
    assert other.state_dict() == guard.state_dict()
    assert (other.state_dict()["streak"], other.skipped_steps()) == (2, 3)
    assert not other.judge(torch.tensor(math.nan), torch.tensor(1.0), [GOOD], 5, 32, 40, NUM_TARGETS)
    other.read()
    assert other.diverged
    assert "3 steps in a row, 3 to 5," in other.reason()


@pytest.mark.parametrize("losses", [(1.0, math.nan), (math.nan, 0.0, math.nan), (math.nan, 2.0)])
def test_a_resume_after_a_step_without_a_target_changes_no_answer(losses: tuple[float, ...]) -> None:
    """Such a step neither ends a streak nor is one of its steps."""

    def answers(guard: StepGuard) -> tuple[object, ...]:
        ended = guard.ended_in_streak()
        return guard.in_streak(), ended, ended and guard.reason(), ended and guard.first_bad_step()

    guard, resumed = StepGuard(Guard(), CPU), StepGuard(Guard(), CPU)
    judged(guard, *losses, 0.0)
    guard.read()
    resumed.load_state_dict(guard.state_dict())
    assert answers(resumed) == answers(guard)
    is_bad = math.isnan(losses[-1])
    assert guard.in_streak() == guard.ended_in_streak() == is_bad
    step = len(losses) + 2
    for each in (guard, resumed):
        each.judge(torch.tensor(math.nan), torch.tensor(1.0), [GOOD], step, 0, 8, NUM_TARGETS)
        each.read()
        assert each.first_bad_step() == (1 + losses.index(math.nan) if is_bad else step)
    assert answers(resumed) == answers(guard)


def test_a_run_that_is_started_again_after_its_end_has_a_new_count() -> None:
    guard = StepGuard(Guard(max_consecutive=2), CPU)
    guard.load_state_dict(GUARD | {"streak": 2, "streak_steps": [8, 9], "skipped_steps": 2})
    assert judged(guard, 1.0) == [True]


# ---- optimizers


def parts(fused: bool) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return net, optimizer


def values(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [t for state in optimizer.state.values() for t in state.values()]
    return [t.clone() for t in [*net.parameters(), *moments]]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_leaves_every_bit(fused: bool) -> None:
    net, optimizer = parts(fused)
    before = values(net, optimizer)
    net.weight.grad[0, 0] = math.nan
    guarded_step(optimizer, torch.tensor(False), torch.tensor(math.nan))
    assert all(torch.equal(a, b) for a, b in zip(values(net, optimizer), before))
    guarded_step(optimizer, torch.tensor(True), None)  # control: it would have changed them
    assert not all(torch.equal(a, b) for a, b in zip(values(net, optimizer), before))


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_are_divided_inside_the_step(fused: bool) -> None:
    net, optimizer = parts(fused)
    other, its_optimizer = parts(fused)
    guarded_step(optimizer, torch.tensor(True), torch.tensor(4.0))  # a power of two: no rounding
    for p in other.parameters():
        p.grad /= 4
    its_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(net, optimizer), values(other, its_optimizer)))


def test_torch_decides_by_the_tensors_that_it_is_given() -> None:
    """Pins torch's protocol: fused optimizers say that they take these tensors, others that they do not."""
    assert getattr(parts(True)[1], "_step_supports_amp_scaling", False)
    assert not getattr(parts(False)[1], "_step_supports_amp_scaling", False)
    optimizer = parts(True)[1]
    guarded_step(optimizer, torch.tensor(True), None)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_the_divisor_clips() -> None:
    norm = torch.tensor(5.0)
    assert 5 / clip_divisor(norm, 2.0).item() == pytest.approx(2.0, rel=1e-6)
    assert clip_divisor(norm, 10.0).item() == 1.0
    assert clip_divisor(norm, 0.0) is None


# ---- runs


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The run whose steps 3 and 4 do nothing."""
    job = make_job(tmp_path_factory.mktemp("idle"), corpus)
    with bad_steps({3, 4}, "nothing"):
        train(job)
    return job


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_step_is_one_that_did_nothing(tmp_path: Path, corpus: Path, idle: Job, fault: str) -> None:
    job = make_job(tmp_path, corpus)
    with bad_steps({3, 4}, fault):
        assert train(job) == 0
    assert files_of(job, 8) == files_of(idle, 8)
    ours, theirs = metrics_of(job), metrics_of(idle)
    for key in ("data/batch_sha", "progress/total_tokens", "train/learning_rate"):
        assert [line[key] for line in ours] == [line[key] for line in theirs]
    assert [line["train/skipped_steps"] for line in ours] == [0, 0, 1, 2, 2, 2, 2, 2]


def test_control_a_run_without_bad_steps_differs(tmp_path: Path, corpus: Path, idle: Job) -> None:
    job = make_job(tmp_path, corpus)
    train(job)
    assert files_of(job, 8) != files_of(idle, 8)


@pytest.mark.full
def test_a_streak_may_be_interrupted_twice(
    tmp_path: Path, corpus: Path, idle: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a signal in it, and by another after it; skipped steps are named with their sequences."""
    skipped = []
    for signal_at, code in ((2, 75), (5, 75), (0, 0)):  # ranks agree to stop at the start of the next step
        with bad_steps({3, 4}, signal_at=signal_at):
            assert train(make_job(tmp_path, corpus)) == code
        skipped.append(
            re.findall(r"step (\d+) is skipped: .* are (\d+ to \d+) .* step (\d)", capsys.readouterr().err)
        )
    job = make_job(tmp_path, corpus)
    assert files_of(job, 8) == files_of(idle, 8)
    assert skipped == [[("3", "16 to 23", "1")], [("4", "24 to 31", "2")], []]
    assert metrics_of(job)[-1]["train/skipped_steps"] == 2


def test_a_run_that_diverges_goes_back_behind_the_weights_that_may_be_the_cause(
    tmp_path: Path, corpus: Path
) -> None:
    """The loss of step 4 is that of the weights which step 3 saved. The same command, now without bad steps,
    then equals a run that never diverged."""
    keys = [*EVERY, "--checkpoint.keep_latest_k=2", "--guard.max_consecutive=3"]
    job = make_job(tmp_path, corpus, *keys)
    with (
        bad_steps(range(4, 9)),
        pytest.raises(Diverged, match=r"3 steps in a row, 4 to 6, .* next start goes back to step 2, .*lr="),
    ):
        train(job)
    assert (saved_steps(job), archived(job.folder)) == ([2], [[3]])
    assert train(job) == 0
    assert metrics_of(job)[-1]["train/skipped_steps"] == 0
    never = make_job(tmp_path, corpus, *keys, name="never")
    train(never)
    assert files_of(job, 8) == files_of(never, 8)


def test_the_command_ends_with_4_and_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, corpus)
    with bad_steps(range(2, 9)):
        code = cli.run(["train", str(tmp_path / "job.toml"), *_same(job), "--guard.skip_non_finite=false"])
    assert code == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "titanlite: training has diverged: step 2 had a loss or gradient norm that is not finite"
    )
    assert "no healthy checkpoint was saved before, and the next start begins at step 1; change" in last


def _same(job: Job) -> list[str]:
    return [f"--job.dump_folder={job.folder}", f"--data.cache_dir={job.data.cache_dir}"]


def test_periodic_saves_wait_for_the_end_of_a_streak(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--checkpoint.interval=4")
    with bad_steps({4, 5}):
        train(job)
    assert saved_steps(job) == [6, 8]


@pytest.mark.full
@pytest.mark.parametrize("limit", [2, 8])
def test_a_run_whose_last_steps_are_skipped_archives_them(tmp_path: Path, corpus: Path, limit: int) -> None:
    """The first start was killed before it could do so; the second has nothing to train, and does it."""
    job = make_job(tmp_path, corpus, f"--guard.max_consecutive={limit}")
    with bad_steps({7, 8}), pytest.raises(Diverged), patch.object(Run, "go_back", lambda run, error: error):
        train(job)
    assert saved_steps(job) == [4, 8]
    with pytest.raises(Diverged, match=r"2 steps in a row, 7 to 8, .* back to step 4"):
        train(job)
    assert (saved_steps(job), archived(job.folder)) == ([4], [[8]])
    assert train(job) == 0
    assert saved_steps(job) == [4, 8]


@pytest.mark.full
def test_a_run_without_a_healthy_checkpoint_begins_again(tmp_path: Path, corpus: Path) -> None:
    """Step 1 is saved with finite weights that may be the cause, and step 3 by a signal, in the streak. The
    run resumes from step 3."""
    job = make_job(tmp_path, corpus, "--guard.max_consecutive=3", *EVERY)
    with bad_steps(range(2, 9), signal_at=2):
        assert train(job) == 75
    assert saved_steps(job) == [1, 3]
    with bad_steps(range(2, 9)), pytest.raises(Diverged, match=r"steps in a row, 2 to 4, .* at step 1; "):
        train(job)
    assert (saved_steps(job), archived(job.folder)) == ([], [[1, 3]])
    assert train(job) == 0
    assert [line["step"] for line in metrics_of(job)] == [*range(1, 9)]


def test_an_error_while_archiving_does_not_hide_that_training_has_diverged(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", "checkpoint")

    monkeypatch.setattr(commit, "archive_after", refused)
    job = make_job(tmp_path, corpus, "--guard.skip_non_finite=false")
    with bad_steps({2}), pytest.raises(Diverged, match=r"step 2 had .* could not be archived: .*Input"):
        train(job)


def test_the_way_back_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is committed only after the run has found that it diverged."""
    diverged, commit_, reason = threading.Event(), commit.commit, StepGuard.reason

    def late(*args: Any) -> Path:
        assert diverged.wait(120)
        return commit_(*args)

    def telling(self: StepGuard) -> str:
        diverged.set()
        return reason(self)

    monkeypatch.setattr(commit, "commit", late)
    monkeypatch.setattr(StepGuard, "reason", telling)
    job = make_job(tmp_path, corpus, "--guard.max_consecutive=1", "--checkpoint.interval=3")
    with bad_steps({5}), pytest.raises(Diverged, match=r"step 5 had .*; the next start goes back to step 3,"):
        train(job)


@pytest.mark.full
def test_the_way_back_for_a_run_that_has_a_load_step(tmp_path: Path, corpus: Path) -> None:
    """The run has gone back to step 4, and is to go back to step 2 and to step 4 again."""
    train(make_job(tmp_path, corpus, "--checkpoint.interval=2"))
    job = make_job(tmp_path, corpus, "--checkpoint.interval=2", "--checkpoint.load_step=4")
    for bad, back in (({5, 6, 7, 8}, 2), ({7, 8}, 4), ({8}, 6)):
        with bad_steps(bad), pytest.raises(Diverged, match=f"8.* not finite; .* goes back to step {back}"):
            train(job)
        assert saved_steps(job)[-1] == back
    assert train(job) == 0
    assert [line["step"] for line in metrics_of(job)] == [*range(1, 9)]


@pytest.mark.full
def test_retention_keeps_two_checkpoints_from_before_a_streak(tmp_path: Path, corpus: Path) -> None:
    """Each start is stopped by a signal in the streak, and saves. The weights of step 2 may be the cause."""
    keys = [*EVERY, "--checkpoint.keep_latest_k=2", "--training.steps=16"]
    for step in (3, 5, 7):
        with bad_steps(range(3, 17), signal_at=step):
            job = make_job(tmp_path, corpus, *keys)
            assert train(job) == 75
    assert saved_steps(job) == [1, 2, 6, 8]


def test_a_state_that_is_not_finite_is_not_saved(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment that became infinite in a step whose loss and norm were finite."""
    save = Checkpointer.save

    def spoiled(self: Checkpointer, state: Any) -> None:
        if state.step == 4:
            next(iter(state.optimizer.state.values()))["exp_avg_sq"].view(-1)[3] = math.inf
        save(self, state)

    monkeypatch.setattr(Checkpointer, "save", spoiled)
    job = make_job(tmp_path, corpus, "--checkpoint.interval=2")
    name = r"optimizer.model.embed_tokens.weight.exp_avg_sq"
    with pytest.raises(Diverged, match=f"after step 4 {name} are not finite; .* goes back to step 2"):
        train(job)
    assert saved_steps(job) == [2]


@pytest.fixture
def poisoned(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A run whose newest checkpoint, step 4, holds a NaN, as one from elsewhere might."""
    save = Checkpointer.save

    def spoiled(self: Checkpointer, state: Any) -> None:
        with torch.no_grad():
            weight = dict(state.net.named_parameters())["model.norm.weight"]
            weight[0] = math.nan if state.step == 4 else weight[0]
            save(self, state)

    with monkeypatch.context() as m:
        m.setattr(Checkpointer, "save", spoiled)
        m.setattr(checkpointer, "non_finite", lambda tensors: [])
        job = make_job(tmp_path, corpus, "--checkpoint.interval=2", "--training.steps=4")
        train(job)
    return job


def test_a_run_never_goes_on_from_a_state_that_is_not_finite(
    poisoned: Job, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(make_job(tmp_path, corpus)) == 0
    err = capsys.readouterr().err
    assert re.search("quarantined-step-4-0: .*model.norm.weight are not finite", err)
    assert f"resumed from {poisoned.folder}/checkpoint/step-2" in err


def test_tools_name_what_is_not_finite(
    poisoned: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = poisoned.folder / "checkpoint/step-4"
    assert cli.run(["checkpoint", "verify", str(poisoned.folder)]) == 3
    out = capsys.readouterr().out
    assert f"{step}: BAD: not finite: model.model.norm.weight\n" in out
    assert f"{step.with_name('step-2')}: good" in out
    for argv in (["export", str(step), str(tmp_path / "exported")], ["generate", str(step), "--prompt", "a"]):
        assert cli.run(argv) == 3
        err = capsys.readouterr().err.splitlines()
        assert all(line.startswith("titanlite: ") for line in err), "no traceback"
        assert "norm.weight has values that are not finite" in err[-1]
    assert not (tmp_path / "exported").exists()


def test_a_value_that_the_export_cannot_hold_is_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(
        tmp_path, corpus, "--training.steps=1", "--optimizer.lr=1e7", "--lr_scheduler.warmup_steps=0"
    )
    train(job)
    assert cli.run(["export", str(job.folder), str(tmp_path / "half"), "--dtype", "float16"]) == 3


def test_moments_count_and_scalars_do_not() -> None:
    w, bad = torch.ones(2, 2), torch.full((2, 2), math.inf)
    assert non_finite({"model": {"w": w}, "optimizer": {"w.m": w, "w.best": torch.tensor(math.inf)}}) == []
    assert non_finite({"model": {"w": w}, "optimizer": {"w.m": bad}}) == ["optimizer.w.m"]
    scale, moment = torch.ones(()), torch.tensor(math.inf)  # of a parameter that is a scalar
    assert non_finite({"model": {"w": scale}, "optimizer": {"w.m": moment}}) == ["optimizer.w.m"]
    for value in (math.nan, math.inf, -math.inf):
        w[1, 0] = value
        assert non_finite({"model": {"w": w}, "optimizer": {}}) == ["model.w"]


def test_no_sample_is_taken_from_logits_that_are_not_finite(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = torch.full((1, 99, 258), math.nan)
    monkeypatch.setattr(ShardedModel, "logits", lambda self, tokens: nan)
    keys = ['--generation.prompts=["a"]', "--generation.freq=2", "--training.steps=3"]
    assert train(make_job(tmp_path, corpus, *keys)) == 0
    assert (
        "no sample at step 2: no text can be sampled: the model's logits are not finite"
        in capsys.readouterr().err
    )


@pytest.fixture
def plain_sgd(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that choose an optimizer which knows nothing of the guard."""
    monkeypatch.setattr(Optimizer, "choices", dict(Optimizer.choices))

    @dataclass(frozen=True, kw_only=True)
    class PlainSGD(Optimizer, name="plain_sgd"):
        """SGD with momentum."""

        def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.groups(model), lr=self.lr, momentum=0.9)

    return ["--optimizer.name=plain_sgd", "--training.steps=4"]


def test_an_optimizer_from_outside_skips_too(tmp_path: Path, corpus: Path, plain_sgd: list[str]) -> None:
    jobs = [make_job(tmp_path, corpus, *plain_sgd, name=fault) for fault in ("gradient", "nothing")]
    for job in jobs:
        with bad_steps({3}, job.folder.name):
            assert train(job) == 0
    assert files_of(jobs[0], 4) == files_of(jobs[1], 4)


def test_a_checkpoint_of_skipped_steps_alone_has_its_state(
    tmp_path: Path, corpus: Path, plain_sgd: list[str]
) -> None:
    whole, stopped = (make_job(tmp_path, corpus, *plain_sgd, name=name) for name in ("whole", "stopped"))
    with bad_steps({1}):
        assert train(whole) == 0
    with bad_steps({1}, signal_at=1):
        assert train(stopped) == 75
    assert train(stopped) == 0
    assert files_of(stopped, 4) == files_of(whole, 4)


def test_train_json_records_what_a_resume_needs(idle: Job) -> None:
    record = json.loads((idle.folder / "checkpoint/step-8/train.json").read_text())
    assert (record["finite"], record["healthy"]) == (True, True)
    guard = record["guard"]
    assert (guard["streak"], guard["skipped_steps"], guard["sequences"]) == (0, 0, [[1, 0, 8]])
    assert guard["outliers"] == {"streak": 0, "losses": [], "log_norms": []}
    assert len(guard["spikes"]["losses"]) == 8
