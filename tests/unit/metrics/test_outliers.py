"""Outlier steps are skipped, and only those: the decisions of the device equal those of a reference, and
survive a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.jobs import make_job, metrics_of
from tests.support.non_finite import OUTLIERS, WATCHED, bad_steps
from tests.support.runs import state_of
from tests.support.tiers import sampled
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.metrics.guard import Guard, StepGuard
from titanlite.metrics.outliers import ENOUGH_STEPS, FLOORS, Outliers
from titanlite.train import train

CPU = torch.device("cpu")
CONFIG = Guard(skip_sigma=6.0)
SOME = torch.tensor(16)  # targets


def noise(num: int, seed: int = 0) -> np.ndarray:
    """Losses that do not fall, with normal noise."""
    return 3 + 0.05 * np.random.default_rng(seed).normal(size=num)


def decide(guard: StepGuard, losses: Iterable[float], norms: Iterable[float] | None = None) -> list[bool]:
    """Whether each step is applied."""
    losses = list(losses)
    applied = []
    for i, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses)), 1):
        loss_, norm_ = torch.tensor(loss, dtype=torch.float32), torch.tensor(norm, dtype=torch.float32)
        applied.append(bool(guard.judge(loss_, norm_, guard.summands(norm_), i, 8 * i, 8 * i + 8, SOME)))
    return applied


def skipped(applied: Sequence[bool]) -> list[int]:
    return [i for i, ok in enumerate(applied) if not ok]


class Reference:
    """The same decisions in NumPy, with a list as the window."""

    def __init__(self, config: Guard):
        self.config, self.window, self.streak, self.bad = config, list[np.ndarray](), 0, 0

    def judge(self, loss: float, norm: float) -> bool:
        config = self.config
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self.bad >= config.limit:
            return False
        self.bad = 0 if finite else self.bad + 1
        if not finite:
            return False
        values = np.array([loss, torch.tensor(norm).log().item()], np.float32)
        if len(self.window) >= min(config.window, ENOUGH_STEPS):
            window = np.array(self.window)
            median = np.median(window, axis=0)
            deviation = np.float32(1.4826) * np.median(np.abs(window - median), axis=0)
            sigmas = (values - median) / np.maximum(deviation, np.array(FLOORS, np.float32))
            if np.any(sigmas > config.skip_sigma):
                if self.streak < config.max_consecutive:
                    self.streak += 1
                    return False
                self.window = []
        self.streak = 0
        self.window = [*self.window, values][-config.window :]
        return True


@pytest.mark.parametrize("seed", range(4))
def test_decisions_equal_those_of_the_reference(seed: int) -> None:
    """With noise, single outliers, streaks, level shifts, NaN and infinity."""
    rng = np.random.default_rng(seed)
    config = Guard(skip_sigma=[3.0, 6.0][seed % 2], window=[16, 128, 5, 1][seed], max_consecutive=4)
    losses, norms = noise(300, seed), np.exp(rng.normal(size=300) / 4)
    losses[rng.integers(300, size=12)] += rng.exponential(size=12)
    norms[rng.integers(300, size=12)] *= 9
    losses[150:] += 1
    norms[200:207] *= 20
    losses[rng.integers(300, size=3)] = [math.nan, math.inf, -math.inf]
    norms[rng.integers(300, size=3)] = [math.nan, math.inf, 1e30]
    losses, norms = losses.astype(np.float32), norms.astype(np.float32)
    reference = Reference(config)
    wanted = [reference.judge(float(loss), float(norm)) for loss, norm in zip(losses, norms)]
    assert decide(StepGuard(config, CPU), losses.tolist(), norms.tolist()) == wanted
    assert wanted.count(False) > 10


def test_a_nan_does_not_poison_the_window() -> None:
    losses = noise(600)
    losses[300] = math.nan
    assert skipped(decide(StepGuard(CONFIG, CPU), losses)) == [300]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_no_step_of_clean_noise_is_skipped(seed: int) -> None:
    norms = np.exp(0.3 * np.random.default_rng(seed).normal(size=600))
    assert skipped(decide(StepGuard(CONFIG, CPU), noise(600, seed), norms.tolist())) == []


def test_low_steps_are_no_outliers() -> None:
    losses, norms = noise(200), np.ones(200)
    losses[100], norms[110:120] = 0.0, 0.0
    assert skipped(decide(StepGuard(CONFIG, CPU), losses, norms.tolist())) == []


def test_a_streak_is_skipped_up_to_its_limit_and_then_applied() -> None:
    losses = noise(300)
    losses[200:220] += 2
    assert skipped(decide(StepGuard(CONFIG, CPU), losses)) == [*range(200, 208)]


def test_a_level_shift_does_not_lock_the_run_up() -> None:
    losses = noise(600)
    losses[300:] += 0.5
    losses[450] += 3  # the window works again
    guard = StepGuard(CONFIG, CPU)
    assert skipped(decide(guard, losses)) == [*range(300, 308), 450]


def test_the_window_starts_anew_where_the_loss_changes() -> None:
    losses = noise(600)
    losses[300:] += 0.5
    losses[450] += 3
    assert skipped(decide(StepGuard(CONFIG, CPU, 1, [8 * 301]), losses)) == [450]


BURSTS = noise(500)
for start in range(200, 500, 8):
    BURSTS[start : start + 7] += 2  # most steps are outliers


def test_outliers_do_not_enter_the_window() -> None:
    assert skipped(decide(StepGuard(CONFIG, CPU), BURSTS)) == [i for i in range(200, 500) if i % 8 != 7]


def test_control_a_window_with_the_outliers_in_it_lets_them_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Outliers._accept

    def poisoned(self: Outliers, values: torch.Tensor, apply: torch.Tensor, restart: torch.Tensor) -> None:
        accept(self, values, torch.ones_like(apply), restart)

    monkeypatch.setattr(Outliers, "_accept", poisoned)
    assert len(skipped(decide(StepGuard(CONFIG, CPU), BURSTS))) < 80


def test_non_finite_steps_and_outliers_are_counted_apart() -> None:
    losses = noise(200)
    losses[100:110] = [9, math.nan] * 5
    guard = StepGuard(Guard(skip_sigma=6, max_consecutive=4), CPU)
    # The streak of outliers goes on over steps that are not finite: the run cannot skip for ever.
    assert skipped(decide(guard, losses)) == [*range(100, 108), 109]
    assert guard.skipped_steps() == 9
    guard.read()
    assert not guard.diverged


def test_ranks_with_other_norms_decide_alike() -> None:
    """Replicas have copies of one gradient; the norm of one is damaged. The decision is by their mean."""
    guards = [StepGuard(CONFIG, CPU, norm_divisor=2.0) for _ in range(2)]
    for step in range(1, 102):
        norms = [torch.tensor(1.0), torch.tensor(9.0 if step == 101 else 1.0)]
        loss = torch.tensor(3.0)
        shares = [guard.summands(norm) for guard, norm in zip(guards, norms)]
        sums = [sum(values) for values in zip(*shares)]
        applied = [
            bool(guard.judge(loss, norm, sums, step, 8 * step, 8 * step + 8, SOME))
            for guard, norm in zip(guards, norms)
        ]
        assert applied == [step < 101] * 2
    (event,) = guards[0].read()
    assert event.about["grad_norm"] == 5


def test_a_step_says_why_it_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    losses, norms = noise(200), np.ones(200)
    losses[150], norms[150], norms[151] = 5, 20, 30
    losses[160:169] += 3
    guard = StepGuard(CONFIG, CPU)
    decide(guard, losses, norms.tolist())
    with caplog.at_level("INFO", "titanlite"):
        events = guard.read()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("step 151 is skipped: loss 5 is ")
    assert " standard deviations above the median 3" in lines[0]
    assert "; gradient norm 20 is 59.9 standard deviations above the median 1; its sequences are" in lines[0]
    assert lines[0].endswith("1208 to 1215 (outlier 1 in a row)")
    assert lines[1].startswith("step 152 is skipped: gradient norm 30 is 68.0 standard deviations above")
    assert lines[1].endswith("(outlier 2 in a row)")
    assert lines[-1].startswith("step 169 is an outlier and is applied, because too many in a row were")
    assert [event.event for event in events] == ["skipped"] * 10 + ["accepted"]
    assert (events[-1].step, events[-1].about["reason"]) == (169, "outlier")
    about = events[0].about
    assert about["reason"] == "outlier"
    assert about["grad_norm_median"] == 1
    assert (about["first_sequence"], about["last_sequence"]) == (1208, 1215)
    assert about["loss_sigmas"] > 6


def stopped_at(step: int, change: Any = None) -> list[bool]:
    """The decisions of a run that is stopped and resumed after `step`; `change` is applied to its state."""
    first, second = StepGuard(CONFIG, CPU), StepGuard(CONFIG, CPU)
    applied = decide(first, BURSTS[:step])
    state = json.loads(json.dumps(first.state_dict()))
    if change:
        change(state)
    second.load_state_dict(state)
    applied += decide(second, BURSTS[step:])
    assert second.skipped_steps() == applied.count(False)
    return applied


def test_a_resumed_run_decides_as_the_uninterrupted_one() -> None:
    whole = decide(StepGuard(CONFIG, CPU), BURSTS)
    for step in (30, 150, 355):
        assert stopped_at(step) == whole


@pytest.mark.full
def test_control_a_run_that_lost_its_window_does_not() -> None:
    def lose(state: dict[str, Any]) -> None:
        state["outliers"] |= {"losses": [], "log_norms": []}

    assert stopped_at(355, lose) != stopped_at(355)


def test_a_shorter_window_keeps_the_newest_steps() -> None:
    long, short = StepGuard(CONFIG, CPU), StepGuard(Guard(skip_sigma=6, window=20), CPU)
    decide(long, noise(300))
    short.load_state_dict(long.state_dict())
    state = short.state_dict()["outliers"]
    assert state["losses"] == noise(300).astype(np.float32)[-20:].tolist()
    long.load_state_dict(short.state_dict())
    assert long.state_dict()["outliers"] == state


def test_without_the_key_no_work_is_queued() -> None:
    guard = StepGuard(Guard(), CPU)
    assert guard._outliers is None
    norm = torch.tensor(1.0)
    assert len(guard.summands(norm)) == 1
    assert skipped(decide(guard, BURSTS)) == []


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("skip_sigma", {"skip_sigma": -1.0}),
        ("skip_sigma", {"skip_sigma": math.inf}),
        ("skip_sigma", {"skip_sigma": math.nan}),
        ("window", {"window": 20_000}),
        ("window", {"window": 0}),
    ],
)
def test_wrong_values_are_refused(key: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        Guard(**values)
    assert error.value.key == key


# ---- runs


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The run whose steps 14, 15 and 17 do nothing."""
    job = make_job(tmp_path_factory.mktemp("idle"), corpus, *WATCHED)
    with bad_steps({14, 15, 17}, "nothing"):
        train(job)
    return job


def is_healthy(job: Job, step: int) -> bool:
    return json.loads((job.folder / f"checkpoint/step-{step}/train.json").read_text())["healthy"]


@pytest.mark.parametrize("fault", sampled(OUTLIERS, {"random tokens"}))
def test_an_outlier_is_a_step_that_did_nothing(tmp_path: Path, corpus: Path, idle: Job, fault: str) -> None:
    """Random tokens with a resume in a streak, and another one soon after it. The checkpoint in the streak is
    not healthy."""
    for last in (14, 16, 20) if fault == "random tokens" else (20,):
        job = make_job(tmp_path, corpus, *WATCHED, f"--training.steps={last}")
        with bad_steps({14, 15, 17}, fault):
            assert train(job) == 0
        if last == 14:
            assert [is_healthy(job, step) for step in (12, 14)] == [True, False]
    assert state_of(job, 20) == state_of(idle, 20) != {}
    events = [json.loads(line) for line in (job.folder / "events.jsonl").read_text().splitlines()]
    skips = [event for event in events if event["event"] == "skipped"]
    assert [event["step"] for event in skips] == [14, 15, 17]
    assert [event["reason"] for event in skips] == ["outlier"] * 3
    assert skips[0]["text"].startswith("step 14 is skipped: ")
    assert [event["first_sequence"] for event in skips] == [104, 112, 128]


@pytest.mark.full
def test_control_without_the_key_the_steps_are_applied(tmp_path: Path, corpus: Path, idle: Job) -> None:
    job = make_job(tmp_path, corpus, *WATCHED, "--guard.skip_sigma=0")
    with bad_steps({14, 15, 17}, "random tokens"):
        train(job)
    assert state_of(job, 20) != state_of(idle, 20)
    assert metrics_of(job)[-1]["train/skipped_steps"] == 0
