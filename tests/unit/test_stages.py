"""[[stages]] and batch ramps: their sections, and what follows from the position in the data order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.amount import Conversion
from titanlite.config.component import ConfigError
from titanlite.data.step_sizes import StepSizes
from titanlite.optim.piecewise import Piecewise
from titanlite.optim.warmup_stable_decay import WarmupStableDecay
from titanlite.runtime.training import BatchRamp, Training
from titanlite.stages import Stage, Stages, check_stages, count_ends, uncounted_ends

END = Stage(until="end")
CONSTANT = Piecewise(points=[[0.0, 1.0]])


def opened(stages: list[Stage], batch_size: int = 8, **training: Any) -> Stages:
    """The stages of a run with sequences of 128 tokens."""
    return Stages(stages, Training(seq_len=128, **training), CONSTANT, batch_size)


def sizes(stages: Stages) -> list[tuple[int, int, int]]:
    return [(s.first_sequence, s.global_batch_size, s.num_splits) for s in stages.step_sizes.sizes]


def test_a_job_without_stages_has_one_size() -> None:
    assert sizes(opened([])) == [(0, 8, 1)]


def test_a_stage_sets_batch_size_and_length_from_its_first_sequence_on() -> None:
    short = Stage(until="100 sequences", seq_len=32, global_batch_size=4)
    main = Stage(until="200 sequences", global_batch_size=16)
    assert sizes(opened([short, main, END])) == [(0, 4, 4), (100, 16, 1), (200, 8, 1)]


def test_a_ramp_runs_across_stages_that_have_no_batch_size() -> None:
    ramp = [
        BatchRamp(until="50 sequences", global_batch_size=2),
        BatchRamp(until="150 sequences", global_batch_size=4),
    ]
    stages = [Stage(until="100 sequences", seq_len=64), END]
    assert sizes(opened(stages, batch_ramp=ramp)) == [(0, 2, 2), (50, 4, 2), (100, 4, 1), (150, 8, 1)]
    fixed = [Stage(until="100 sequences", global_batch_size=6), END]
    assert sizes(opened(fixed, batch_ramp=ramp)) == [(0, 6, 1), (100, 4, 1), (150, 8, 1)]


@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_learning_rate_follows_the_ramp(rule: str, power: float) -> None:
    ramp = [BatchRamp(until="50 sequences", global_batch_size=2)]
    stages = opened([], batch_ramp=ramp, batch_ramp_lr=rule, steps=100)
    assert stages.lr_factor(1, 0) == stages.lr_factor(25, 48) == (2 / 8) ** power
    assert stages.lr_factor(26, 50) == 1.0


def test_a_stage_has_a_factor_and_a_schedule_of_its_own() -> None:
    decay = Piecewise(points=[[1.0, 1.0], [5.0, 0.2]])
    stages = opened(
        [Stage(until="64 sequences", lr_factor=0.5), Stage(until="end", lr_scheduler=decay)], steps=13
    )
    assert [stages.num_steps(i) for i in (0, 1)] == [8, 5]
    assert stages.lr_factor(8, 56) == 0.5
    factors = [stages.lr_factor(step, 8 * (step - 1)) for step in range(9, 14)]
    assert factors == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=4))
def test_every_step_of_a_stage_has_its_own_number(columns: list[tuple[int, int]]) -> None:
    """A schedule of a stage sees the steps 1, 2, ..., num_steps, wherever the steps cross boundaries."""
    ends = [sum(length for length, _ in columns[: i + 1]) for i in range(len(columns))]
    seen: list[tuple[int, int]] = []

    class Recording(Piecewise):
        def factor(self, step: int, training_steps: int) -> float:
            seen.append((step, training_steps))
            return 1.0

    recording = Recording(points=[[0.0, 1.0]])
    stages = opened(
        [
            Stage(until=until, global_batch_size=batch_size, lr_scheduler=recording)
            for until, (_, batch_size) in zip([*(f"{end} sequences" for end in ends[:-1]), "end"], columns)
        ],
        steps=60,
    )
    position = 0
    for step in range(1, 61):
        stages.lr_factor(step, position)
        position += stages.step_sizes.at(position).global_batch_size
    counts = [stages.num_steps(i) for i in range(len(stages))]
    assert sum(counts) == 60
    assert seen == [(step, count) for count in counts for step in range(1, count + 1)]


def conversion(seq_len: int = 128, epoch: int | None = 1000) -> Conversion:
    return Conversion(seq_len, 8, StepSizes.constant(8), 12_800, epoch)


def test_ends_are_counted_in_sequences() -> None:
    stages = [Stage(until=u) for u in ("12.8K tokens", "2 tokens/parameter", "0.5 epochs", "end")]
    training = Training(batch_ramp=[BatchRamp(until="1 epoch", global_batch_size=2)])
    assert sorted(uncounted_ends(stages, training)) == [
        "stages.0.until", "stages.1.until", "stages.2.until", "training.batch_ramp.0.until",
    ]  # fmt: skip
    training, counted = count_ends(training, stages, conversion())
    assert [stage.until for stage in counted] == ["100 sequences", "200 sequences", "500 sequences", "end"]
    assert training.batch_ramp[0].until == "1000 sequences"
    assert uncounted_ends(counted, training) == {}


def test_an_end_before_the_beginning_is_refused() -> None:
    stages = [Stage(until="1M tokens"), Stage(until="0.5M tokens"), END]
    with pytest.raises(ConfigError) as error:
        count_ends(Training(), stages, conversion())
    assert error.value.key == "stages.1.until"
    assert str(error.value) == (
        '"0.5M tokens" is sequence 3,906, which is not after "1M tokens", where it begins, sequence 7,812'
    )


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"until": "5 steps"}, "until", "'5 steps' is no place in the data order: give tokens, sequences or"),
        ({"until": "soon"}, "until", "'soon' is not an amount .*, or \"end\""),
        ({"until": "end", "lr_factor": -1.0}, "lr_factor", "-1.0 is below 0"),
        ({"until": "end", "global_batch_size": 0}, "global_batch_size", "0 is below 1"),
        ({"until": "end", "weights": [0, 0.0]}, "weights", "not all 0"),
        ({"until": "end", "weights": {"a": "1"}}, "weights", "neither a list of weights nor a table"),
        ({"until": "end", "weights": 3}, "weights", "neither a list of weights nor a table"),
        ({"until": "end", "weights": [True]}, "weights", "neither a list of weights nor a table"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Stage(**values)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("stages", "key", "message"),
    [
        (
            [Stage(until="1K tokens")],
            "stages.0.until",
            'stage 1: "1K tokens": the last stage must',
        ),
        ([END, END], "stages.0.until", 'stage 1: only the last stage has until = "end"'),
        (
            [Stage(until="end", name="main", weights={"wbe": 1})],
            "stages.0.weights",
            r"stage 1 \(main\): unknown source 'wbe'; did you mean 'web'\? \(known: code, web\)",
        ),
        ([Stage(until="end", weights=[1])], "stages.0.weights", "1 weights for 2 sources: web, code"),
        ([Stage(until="end", seq_len=48)], "stages.0.seq_len", "48 is not .* 128 divided by .*: 128, 64, 32"),
        ([Stage(until="end", seq_len=0)], "stages.0.seq_len", "0 is not training.seq_len"),
        ([Stage(until="end", seq_len=256)], "stages.0.seq_len", "with checkpoint.initial_load_path"),
    ],
)
def test_stages_that_do_not_fit_the_job_are_refused(stages: list[Stage], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_stages(stages, Training(seq_len=128), ["web", "code"])
    assert error.value.key == key


def test_a_schedule_that_does_not_fit_its_stage_is_refused() -> None:
    long = WarmupStableDecay(warmup_steps=50)
    stages = opened([Stage(until="80 sequences", lr_scheduler=long), END], steps=100)
    with pytest.raises(ConfigError, match=r"stage 1: 50 steps of warmup need .* more than 10 steps") as error:
        stages.check_schedules()
    assert error.value.key == "stages.0.lr_scheduler.warmup_steps"


def test_stages_are_described() -> None:
    ramp = [BatchRamp(until="40 sequences", global_batch_size=4)]
    stages = [
        Stage(until="80 sequences", name="short", seq_len=32, weights={"web": 1}),
        Stage(until="160 sequences", global_batch_size=16, lr_factor=0.5),
        END,
    ]
    assert opened(stages, steps=20, batch_ramp=ramp).describe(["web", "code"]) == [
        "stage 1 (short): from sequence 0, steps 1 to 15; 4, from sequence 40 on 8 sequences per step; each "
        "sequence as 4 of 32 tokens; weights web 1, code 0",
        "stage 2: from sequence 80, steps 16 to 20; 16 sequences per step; learning rate x 0.5",
        "stage 3: not reached, the run ends after 20 steps",
    ]
    assert opened([]).describe([]) == []
