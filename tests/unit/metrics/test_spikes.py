"""The spike detector reports each rise of the loss that lasts once, and no noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import archived
from tests.support.curves import KINDS, noise_like
from tests.support.jobs import make_job
from tests.support.non_finite import bad_steps
from tests.support.tiers import full
from titanlite.checkpoint import commit
from titanlite.config.component import ConfigError
from titanlite.errors import Diverged
from titanlite.metrics.guard import Guard, StepGuard
from titanlite.metrics.spikes import Spike, SpikeDetector
from titanlite.train import train

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
CPU = torch.device("cpu")


def curve(num: int, seed: int = 0, sigma: float = 0.05, kind: str = "normal") -> np.ndarray:
    """A loss that falls like a power of the step, from step 1 on."""
    return 2 + 8 * np.arange(1.0, num + 1) ** -0.4 + sigma * noise_like(kind, num, seed)


def find(losses: Iterable[float], detector: SpikeDetector | None = None, first_step: int = 1) -> list[Spike]:
    detector = detector or SpikeDetector()
    spikes = [detector.add(step, float(loss)) for step, loss in enumerate(losses, first_step)]
    return [spike for spike in spikes if spike]


def raised(first: int, last: int, height: float, num: int = 1500) -> np.ndarray:
    losses = curve(num)
    losses[first - 1 : last] += height
    return losses


def test_a_spike_has_its_start_and_its_height() -> None:
    (spike,) = find(raised(1000, 1060, 0.8))
    assert spike.start_step == 1000
    assert 1020 <= spike.detected_step <= 1025
    assert spike.level == pytest.approx(np.median(curve(1500)[743:999]), abs=0.02)
    assert spike.height == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize(
    ("losses", "starts"),
    [
        (raised(1000, 1500, 0.8), [1000]),  # a level that stays is reported once
        (raised(1000, 1060, 0.8) + raised(1200, 1260, 0.8) - curve(1500), [1000, 1200]),
        (raised(1000, 1500, 0.8) + raised(1400, 1500, 1.0) - curve(1500), [1000, 1400]),
        (raised(1000, 1012, 3.0), []),  # too short
        (raised(1000, 1001, 1e6), []),
        (raised(1000, 1500, 0.09), []),  # too low
        (raised(1000, 1500, -0.5), []),
        (raised(100, 140, 3.0), []),  # before the first 272 steps
    ],
    ids=["stays", "two", "on top", "short", "one step", "low", "falls", "early"],
)
def test_which_rises_are_spikes(losses: np.ndarray, starts: list[int]) -> None:
    assert [spike.start_step for spike in find(losses)] == starts


def test_a_ramp_is_found_near_its_beginning() -> None:
    losses = curve(1500)
    losses[999:1099] += np.linspace(0, 2, 100)
    losses[1099:] += 2
    (spike,) = find(losses)
    assert 1000 < spike.start_step < 1040


def test_warm_up_gives_no_spike() -> None:
    """The loss rises for a while in the first steps, while the learning rate is raised."""
    losses = curve(1500)
    losses[40:120] += np.sin(np.linspace(0, math.pi, 80))
    assert find(losses) == []


@pytest.mark.full
@pytest.mark.parametrize("num_seeds", [5, full(334)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_noise_gives_no_spike(num_seeds: int, kind: str, sigma: float) -> None:
    num_alarms = sum(bool(find(curve(2000, seed, sigma, kind))) for seed in range(num_seeds))
    assert num_alarms == 0


def recorded(node: Any) -> Iterable[list[float]]:
    """The losses of all lists of logged steps in a result of a benchmark."""
    if isinstance(node, list) and node and isinstance(node[0], dict) and "train/loss" in node[0]:
        yield [record["train/loss"] for record in node]
    elif isinstance(node, (list, dict)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from recorded(child)


def test_the_recorded_runs_give_none_and_a_planted_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shorter than the detector's window, which is shortened here."""
    monkeypatch.setattr("titanlite.metrics.spikes.BEFORE", 32)
    monkeypatch.setattr("titanlite.metrics.spikes.RECENT", 8)
    curves = [c for file in sorted(RESULTS.glob("*.json")) for c in recorded(json.loads(file.read_text()))]
    long = [losses for losses in curves if len(losses) >= 80]
    assert len(long) >= 7
    for losses in long:
        assert find(losses) == []
        assert len(find([*losses, *[losses[-1] + 4] * 30])) == 1


@pytest.mark.full
@pytest.mark.parametrize("step", [100, 271, 1003, 1008, 1012, 1022, 1023, 1040, 1300])
def test_a_resumed_detector_finds_the_same(step: int) -> None:
    losses, whole = raised(1000, 1400, 0.8), find(raised(1000, 1400, 0.8))
    first, second = SpikeDetector(), SpikeDetector()
    before = find(losses[:step], first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + find(losses[step:], second, step + 1) == whole != []


def test_control_a_detector_that_lost_its_state_finds_none() -> None:
    assert find(raised(1000, 1400, 0.8)[900:]) == []


# ---- in the guard

HIGH = 3 + 0.05 * noise_like("normal", 500, 0)
HIGH[399:] += 0.8  # from step 400 on


def judge(guard: StepGuard, losses: Iterable[float], first_step: int = 1, num_sequences: int = 8) -> None:
    """A step with a loss of 0 has no target."""
    norm = torch.tensor(1.0)
    for step, loss in enumerate(losses, first_step):
        first = (step - 1) * num_sequences
        loss_ = torch.tensor(loss, dtype=torch.float32)
        num_targets = torch.tensor(num_sequences if loss else 0)
        guard.judge(loss_, norm, guard.summands(norm), step, first, first + num_sequences, num_targets)


def test_steps_without_a_target_are_not_in_the_windows() -> None:
    guards = [StepGuard(Guard(skip_sigma=20.0), CPU) for _ in range(2)]
    judge(guards[0], HIGH[:450])
    judge(guards[1], np.stack([HIGH[:450], np.zeros(450)], 1).ravel())
    (alone,), (mixed,) = [guard.read() for guard in guards]
    assert alone.about["start_step"] == 400
    assert mixed.about["start_step"] == 799
    assert mixed.about["height"] == alone.about["height"]
    states = [guard.state_dict() for guard in guards]
    assert states[0]["outliers"] == states[1]["outliers"]
    assert states[0]["spikes"]["losses"] == states[1]["spikes"]["losses"]


def test_a_spike_is_logged_with_its_sequences(caplog: pytest.LogCaptureFixture) -> None:
    guard = StepGuard(Guard(), CPU)
    judge(guard, HIGH[:450])
    with caplog.at_level("INFO", "titanlite"):
        (event,) = guard.read(leave=1)
    assert (event.event, event.about["start_step"]) == ("spike", 400)
    assert event.step == event.about["detected_step"]
    assert event.about["first_sequence"] == 399 * 8
    assert event.about["last_sequence"] == event.step * 8 - 1
    assert f"the sequences of these steps are 3192 to {event.step * 8 - 1}" in caplog.text
    assert not guard.diverged
    assert guard.read() == []


def test_a_spike_ends_the_run_if_asked_to() -> None:
    guard = StepGuard(Guard(on_spike="stop"), CPU)
    judge(guard, HIGH[:450])
    (event,) = guard.read()
    assert guard.diverged
    assert guard.first_bad_step() == 400
    assert guard.sequences_of_spike() == [(3192, 8 * event.step - 1)]
    assert "training has diverged: the loss has spiked by 0.8" in guard.reason()
    assert "at step 400 it rose from" in guard.reason()


def test_a_run_rewinds_as_often_as_it_may() -> None:
    guard = StepGuard(Guard(on_spike="rewind", max_rewinds=1), CPU)
    healthy = guard.state_dict()
    judge(guard, HIGH[:450])
    assert not guard.must_rewind
    guard.read()
    assert guard.must_rewind
    assert not guard.diverged
    guard.load_state_dict(healthy)
    guard.num_rewinds = 1
    assert not guard.must_rewind
    saved = guard.state_dict()
    guard.load_state_dict(saved)  # the number of rewinds survives a resume
    judge(guard, HIGH[:450])
    guard.read()
    assert not guard.must_rewind
    assert guard.diverged


def test_keys_of_a_rewind_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="0 is below 1"):
        Guard(rewind_margin=0)
    Guard(on_spike="rewind").check(saves_checkpoints=True, is_deterministic=True)
    Guard(on_spike="stop").check(saves_checkpoints=False, is_deterministic=True)
    with pytest.raises(ConfigError, match=r"checkpoint\.enable = false saves none"):
        Guard(on_spike="rewind").check(saves_checkpoints=False, is_deterministic=True)


def test_a_state_has_the_newest_step_and_its_spike_is_still_reported() -> None:
    """At a save the decision on the newest step is unread. It is part of the state, and of the next read() --
    of the run that goes on, and of one that resumes."""
    losses, guard = HIGH, StepGuard(Guard(), CPU)
    judge(guard, losses[:450])
    detected = guard.read()[0].step
    guard, resumed = StepGuard(Guard(), CPU), StepGuard(Guard(), CPU)
    judge(guard, losses[:detected])
    assert guard.read(leave=1) == []
    state = json.loads(json.dumps(guard.state_dict()))
    assert len(state["spikes"]["losses"]) == 272
    resumed.load_state_dict(state)
    for each in (guard, resumed):
        judge(each, losses[detected:450], detected + 1)
        (event,) = each.read(leave=1)
        assert event.step == detected
        assert each.read() == []


def test_a_step_in_a_rise_is_not_healthy() -> None:
    losses, guard = HIGH, StepGuard(Guard(), CPU)
    judge(guard, losses[:399])
    assert guard.is_healthy()
    judge(guard, losses[399:415], 400)
    assert not guard.is_healthy()


def test_sequences_of_steps_are_known_over_changes_of_the_batch_size() -> None:
    guard, resumed = StepGuard(Guard(), CPU), StepGuard(Guard(), CPU)
    norm = torch.tensor(1.0)
    ranges = {1: (0, 8), 2: (8, 16), 3: (16, 32), 4: (40, 56), 5: (56, 72)}
    for step, (first, end) in ranges.items():
        guard.judge(torch.tensor(3.0), norm, guard.summands(norm), step, first, end, torch.tensor(16))
    assert guard.state_dict()["sequences"] == [[1, 0, 8], [3, 16, 16], [4, 40, 16]]
    resumed.load_state_dict(guard.state_dict())
    for step, (first, end) in ranges.items():
        assert resumed.sequences_of(step, step) == (first, end - 1)
    assert resumed.sequences_of(-3, 4) == (0, 55)


# ---- runs


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector that compares 4 losses with the 8 before, so that a short run can have a spike."""
    monkeypatch.setattr("titanlite.metrics.spikes.BEFORE", 8)
    monkeypatch.setattr("titanlite.metrics.spikes.RECENT", 4)


SPIKING = [
    "--training.steps=34",
    "--checkpoint.interval=8",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.total_steps=40",
]


@pytest.mark.usefixtures("short_windows")
def test_a_run_whose_loss_spikes_says_so_and_goes_on(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, corpus, *SPIKING)
    with bad_steps(range(22, 35), "random tokens"):
        assert train(job) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "the loss has spiked" in line]
    assert "at step 22 it rose from 2." in line
    events = [json.loads(text) for text in (job.folder / "events.jsonl").read_text().splitlines()]
    (spike,) = [event for event in events if event["event"] == "spike"]
    assert (spike["start_step"], spike["first_sequence"]) == (22, 168)
    assert spike["last_sequence"] == 8 * spike["step"] - 1
    assert spike["height"] > 1


@pytest.mark.full
@pytest.mark.usefixtures("short_windows")
def test_a_run_that_stops_at_a_spike_names_the_checkpoint_before_it(tmp_path: Path, corpus: Path) -> None:
    """Step 24 lies in the rise, and is archived. Starting the run again gives the same result."""
    job = make_job(tmp_path, corpus, *SPIKING, "--guard.on_spike=stop")
    for _ in range(2):
        with (
            bad_steps(range(22, 35), "random tokens"),
            pytest.raises(Diverged, match=r"the loss has spiked by .* at step 22 .* goes back to step 16"),
        ):
            train(job)
    steps = [step for step, _ in commit.list_committed(job.folder / "checkpoint")]
    assert (steps, archived(job.folder)) == ([8, 16], [[24], [24]])


def test_steps_are_compared_only_since_the_last_change_of_the_loss() -> None:
    """A stage with other sources has a higher loss; a spike in it is found, also after a resume."""
    losses = raised(800, 1500, 0.8)
    losses[1199:1300] += 0.8
    change = 799 * 8 - 3  # the first step that begins after it is step 800
    guard, control = StepGuard(Guard(), CPU, 1, [change]), StepGuard(Guard(), CPU)
    for each in (guard, control):
        judge(each, losses[:799])
    resumed = StepGuard(Guard(), CPU, 1, [change])
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for each in (guard, control, resumed):
        judge(each, losses[799:1400], 800)
    starts = [[event.about["start_step"] for event in each.read()] for each in (guard, control, resumed)]
    assert starts == [[1200], [800, 1200], [1200]]
    assert guard.state_dict() == resumed.state_dict()
