"""[[stages]] and batch ramps: their sections, and what follows from the position in the data order."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.amount import Amount, Conversion
from titanlite.config.component import ConfigError
from titanlite.data.loader import MicroBatches
from titanlite.data.order import Mixture, key_of, permute
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSizes
from titanlite.optim.piecewise import Piecewise
from titanlite.optim.warmup_stable_decay import WarmupStableDecay
from titanlite.runtime.training import BatchRamp, Training
from titanlite.stages import Stage, Stages, check_sources_are_read, check_stages, count_ends, uncounted_ends

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


def test_the_last_stage_ends_with_the_run() -> None:
    """Also after a change of the batch size while the run was stopped: it has taken 100 steps of 8 sequences
    and takes 16 from there on. And with skipped sequences, which bring the stage nearer."""
    decay = WarmupStableDecay(warmup_steps=0, decay_ratio=1.0, min_lr_factor=0.1)
    stages = opened(
        [Stage(until="1600 sequences"), Stage(until="end", lr_scheduler=decay)], batch_size=16, steps=200
    )
    factors = [stages.lr_factor(step, 1600 + 16 * (step - 151)) for step in range(151, 201)]
    assert factors == [decay.factor(step, 50) for step in range(1, 51)]
    factors = [stages.lr_factor(step, 1600 + 16 * (step - 91)) for step in range(91, 201)]
    assert factors == [decay.factor(step, 110) for step in range(1, 111)]


def test_the_schedule_of_a_stage_has_no_step_after_its_last_one() -> None:
    """Skipped sequences may move the last step of a stage by less than a step."""
    decay = Piecewise(points=[[1.0, 1.0], [10.0, 0.1], [11.0, 0.0]])
    stages = opened([Stage(until="80 sequences", lr_scheduler=decay), END], steps=100)
    factors = [stages.lr_factor(11, first) for first in (64, 72, 73, 79)]
    assert factors == pytest.approx([0.2, 0.1, 0.1, 0.1])
    assert stages.lr_factor(12, 80) == 1.0


def test_losses_change_with_the_sources_and_the_sequence_length() -> None:
    stages = [
        Stage(until="10 sequences", seq_len=64),
        Stage(until="20 sequences"),
        Stage(until="30 sequences", global_batch_size=4, lr_factor=0.5),
        Stage(until="40 sequences", weights=[1, 0]),
        END,
    ]
    assert opened(stages).loss_changes == [10, 30, 40]
    assert opened([]).loss_changes == []


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
        ({"until": "100k tokens"}, "until", r"'100k tokens'; did you mean 'K'\? \(known: B, K, M, T\)$"),
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
            "stages.0.weights.wbe",
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


def test_a_source_that_no_stage_reads_is_refused() -> None:
    sources = {"web": 3.0, "code": 0.0}
    check_sources_are_read([Stage(until="1K tokens"), Stage(until="end", weights=[1, 1])], sources)
    for stages in ([], [END], [Stage(until="end", weights={"web": 1})]):
        with pytest.raises(ConfigError, match=r"^0, and no stage gives code a weight; to exclude a") as error:
            check_sources_are_read(stages, sources)
        assert error.value.key == "data.sources.1.weight"


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
        "stage 1 (short): from sequence 0, steps 1 to 15; 4 sequences per step, 8 from sequence 40 on; each "
        "sequence as 4 of 32 tokens; weights web 1, code 0",
        "stage 2: from sequence 80, steps 16 to 20; 16 sequences per step; learning rate x 0.5",
        "stage 3: not reached, the run ends after 20 steps",
    ]
    assert opened([]).describe([]) == []


# ---- the sequences of every step


class Plan(NamedTuple):
    """A job without files: what decides which sequences each step takes."""

    sizes: list[int]  # sequences per source
    stages: list[Stage]
    ramp: list[BatchRamp]
    batch_size: int
    skipped: SkippedSequences

    def opened(self, **training: Any) -> Stages:
        return opened(self.stages, self.batch_size, batch_ramp=self.ramp, **training)

    def mixture(self) -> Mixture:
        weights = [stage.weights or [1.0] * len(self.sizes) for stage in self.stages]
        firsts = [int(stage.until.split()[0]) for stage in self.stages[:-1]]
        names = [str(k) for k in range(len(self.sizes))]
        return Mixture(self.sizes, names, weights[0], 3, list(zip(firsts, weights[1:])))


BATCH_SIZES = st.sampled_from([8, 16, 24, 40])  # which 1, 2 and 4 ranks can share in micro-batches of 2


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    weights = st.none() | st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)).filter(any)
    ends = draw(st.lists(st.integers(1, 400), max_size=3, unique=True).map(sorted))
    stages = [
        Stage(
            until=until,
            weights=draw(weights),
            global_batch_size=draw(st.none() | BATCH_SIZES),
            seq_len=draw(st.sampled_from([None, 64, 32])),
        )
        for until in [*(f"{end} sequences" for end in ends), "end"]
    ]
    ramp_ends = draw(st.lists(st.integers(1, 400), max_size=2, unique=True).map(sorted))
    ramp = [BatchRamp(until=f"{end} sequences", global_batch_size=draw(BATCH_SIZES)) for end in ramp_ends]
    first = st.integers(0, 400)
    ranges = draw(st.lists(st.tuples(first, st.integers(0, 60)), max_size=3))
    skipped = SkippedSequences.merge([(a, a + length) for a, length in ranges])
    return Plan(sizes, stages, ramp, draw(BATCH_SIZES), skipped)


def expected_steps(plan: Plan, num_steps: int) -> list[tuple[list[int], int]]:
    """The sequences of each step and how many shorter ones each is trained as, found number by number."""
    numbers = (n for n in count() if n not in plan.skipped)
    steps, first = [], next(numbers)
    for _ in range(num_steps):
        stage = next(s for s in plan.stages if s.until == "end" or first < int(s.until.split()[0]))
        ramp = [entry.global_batch_size for entry in plan.ramp if first < int(entry.until.split()[0])]
        size = stage.global_batch_size or (ramp[0] if ramp else plan.batch_size)
        steps.append(([first, *islice(numbers, size - 1)], 128 // (stage.seq_len or 128)))
        first = next(numbers)
    return steps


def taken_steps(plan: Plan, hops: list[tuple[int, int, int]]) -> list[tuple[list[int], int]]:
    """The same as the loaders of all ranks take them. `hops`: steps, ranks and micro-batch size of each start
    of the program."""
    sizes, position, steps = plan.opened().step_sizes, 0, []
    for num_steps, num_ranks, size in hops:
        ranks = [
            iter(MicroBatches(position, sizes, size, rank, num_ranks, plan.skipped))
            for rank in range(num_ranks)
        ]
        for _ in range(num_steps):
            step = sizes.at(plan.skipped.next(position))
            batches = [
                next(rank) for _ in range(step.global_batch_size // (size * num_ranks)) for rank in ranks
            ]
            assert {batch.num_splits for batch in batches} == {step.num_splits}
            steps.append(([n for batch in batches for n in batch.numbers], step.num_splits))
            position = plan.skipped.advance(position, step.global_batch_size)
    return steps


def assert_prefixes_of_epochs(plan: Plan, mixture: Mixture, numbers: list[int]) -> None:
    """With the skipped sequences among them, the first sequences of a run are a prefix of the epochs of each
    source: every epoch has each sequence once, and the last one begins like the whole epoch."""
    end = max(numbers) + 1
    assert sorted([*numbers, *(n for n in range(end) if n in plan.skipped)]) == list(range(end))
    sources, sequences = mixture.locate(np.arange(end))
    for k, size in enumerate(plan.sizes):
        mine = sequences[sources == k].tolist()
        for epoch, begin in enumerate(range(0, len(mine), size)):
            whole = permute(np.arange(size), size, key_of("epoch", 3, str(k), epoch))
            assert mine[begin : begin + size] == whole.tolist()[: len(mine) - begin]


HOPS = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])), min_size=1, max_size=4
)


@settings(max_examples=150, deadline=None)
@given(plans(), HOPS)
def test_every_step_takes_its_sequences_on_any_ranks_and_after_any_interruption(
    plan: Plan, hops: list[tuple[int, int, int]]
) -> None:
    steps = taken_steps(plan, hops)
    assert steps == expected_steps(plan, len(steps))
    assert_prefixes_of_epochs(plan, plan.mixture(), [n for numbers, _ in steps for n in numbers])


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(0, 40), st.integers(0, 30))
def test_the_end_of_a_run_counts_the_skipped_sequences(plan: Plan, before: int, after: int) -> None:
    numbers = [step for step, _ in expected_steps(plan, before + after)]
    first, end = ([0, *(step[-1] + 1 for step in numbers)][i] for i in (before, before + after))
    stages = plan.opened(steps=before + after + 1)
    assert stages.last_sequence(before + 1, first, plan.skipped) == end


def test_control_the_epochs_of_sources_counted_from_zero_are_found() -> None:
    stages = [Stage(until="200 sequences", weights=[3, 1]), Stage(until="end", weights=[1, 1])]
    plan = Plan([300, 100], stages, [], 8, SkippedSequences())
    numbers = [n for step, _ in expected_steps(plan, 40) for n in step]
    assert_prefixes_of_epochs(plan, plan.mixture(), numbers)
    from_zero = plan.mixture()
    from_zero.stages[1]._before[:] = 0
    with pytest.raises(AssertionError):
        assert_prefixes_of_epochs(plan, from_zero, numbers)
    with pytest.raises(AssertionError):
        assert_prefixes_of_epochs(plan, plan.mixture(), numbers[1:])


def test_amounts_in_the_schedule_of_a_stage_are_counted_from_its_first_step() -> None:
    schedule = WarmupStableDecay(
        warmup_steps=Amount.parse("512 tokens"),  # type: ignore[arg-type]
        total_steps=Amount.parse("1.28K tokens"),  # type: ignore[arg-type]
    )
    ramp = [BatchRamp(until="22 sequences", global_batch_size=2)]
    stages = [Stage(until="19 sequences"), Stage(until="end", lr_scheduler=schedule)]
    staged = opened(stages, batch_size=4, batch_ramp=ramp)
    counted = staged.count_schedules(conversion())[1].lr_scheduler
    assert isinstance(counted, WarmupStableDecay)
    # its first step takes the sequences 20 and 21, the steps after it take 4: 4 sequences are 1 whole step
    assert (counted.warmup_steps, counted.total_steps) == (1, 3)
    short = replace(schedule, warmup_steps=Amount.parse("1 token"))
    late = Stage(until="end", name="late", lr_scheduler=short)
    message = r"stage 2 \(late\): '1 token' is less than one step, which takes 2 sequences"
    with pytest.raises(ConfigError, match=message) as error:
        opened([stages[0], late], 4, batch_ramp=ramp).count_schedules(conversion())
    assert error.value.key == "stages.1.lr_scheduler.warmup_steps"


@pytest.mark.parametrize("end", ["9223372036854775807 sequences", "1000000T tokens/parameter"])
def test_an_end_that_cannot_be_counted_is_refused(end: str) -> None:
    with pytest.raises(ConfigError, match=r"is 2\^62 sequences or more, which cannot be counted") as error:
        count_ends(Training(), [Stage(until=end), END], conversion())
    assert error.value.key == "stages.0.until"


def test_a_stage_that_a_step_jumps_over_is_named() -> None:
    stages = [Stage(until="90 sequences"), Stage(until="95 sequences"), Stage(until="100 sequences"), END]
    lines = opened(stages, steps=20).describe([])
    assert lines[1:3] == [
        "stage 2: no step begins in it",
        "stage 3: from sequence 95, steps 13 to 13; 8 sequences per step",
    ]
