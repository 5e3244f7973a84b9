"""[[stages]]: settings that change while a run trains, at places in the data order.

A stage begins where the one before it ends. Its boundaries are numbers of training sequences, so they do not
depend on batch sizes, ranks or interruptions, and everything that a stage sets is a function of the position
in the data order, never state."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config.amount import Amount, Conversion
from titanlite.config.component import ConfigError, suggest
from titanlite.config.resolve import resolve
from titanlite.config.toml import as_tree
from titanlite.data.skips import SkippedSequences
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.optim.schedule import LRScheduler
from titanlite.runtime.training import Training

END = "end"  # of the run: where the last stage ends
RAMP_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a run. Keys that are not set have the values of [training], [data] and [lr_scheduler]."""

    until: str
    """End of the stage, counted from the start of the run: "4B tokens", "1.5 epochs" (of all sources), "20
    tokens/parameter" or "1000000 sequences"; the last stage: "end"."""
    name: str = ""
    """Name in the log, such as "decay"."""
    weights: Any = None
    """Weights of the sources, as a list in their order or by name: `{ "web" = 3, "code" = 1 }`. Sources with
    weight 0, or not named, are not read."""
    global_batch_size: int | None = None
    """Sequences of training.seq_len tokens per optimizer step; training.batch_ramp does not apply."""
    seq_len: int | None = None
    """Tokens of shorter sequences: training.seq_len divided by a power of 2. Each sequence is trained as
    several."""
    lr_factor: float = 1.0
    """Factor of the learning rate, beside the schedule's."""
    lr_scheduler: LRScheduler | None = None
    """Schedule of this stage, `[stages.lr_scheduler] name = "..."`, instead of the run's. Its steps are those
    of the stage: the first is step 1, and amounts such as "1B tokens" are counted from its first sequence."""

    def __post_init__(self) -> None:
        if self.until != END:
            try:
                Amount.parse_place(self.until)
            except ConfigError as e:
                is_near = any(map(str.isdigit, self.until))  # to an amount, so "end" was not meant
                raise ConfigError(str(e) if is_near else f'{e}, or "{END}"', "until") from None
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ConfigError(f"{self.global_batch_size} is below 1", "global_batch_size")
        if not 0 <= self.lr_factor < float("inf"):
            raise ConfigError(f"{self.lr_factor} is below 0 or not finite", "lr_factor")
        if self.weights is not None:
            _check_weights(self.weights)

    def weights_of(self, sources: Sequence[str]) -> list[float] | None:
        """Return the weights in the order of the names of all sources; None for the weights in data.sources.
        Raises ConfigError for names or a number of weights that do not fit the sources."""
        weights = self.weights
        if isinstance(weights, dict):
            for name in weights:
                if name not in sources:
                    raise ConfigError(f"unknown source {name!r}{suggest(name, sources)}", f"weights.{name}")
            return [float(weights.get(name, 0.0)) for name in sources]
        if weights is not None and len(weights) != len(sources):
            raise ConfigError(
                f"{len(weights)} weights for {len(sources)} sources: {', '.join(sources)}", "weights"
            )
        return None if weights is None else [float(weight) for weight in weights]

    def num_splits(self, seq_len: int) -> int:
        """Return how many shorter sequences each sequence of `seq_len` tokens is trained as. Raises
        ConfigError if it cannot be split so."""
        if self.seq_len is None:
            return 1
        num = seq_len // max(self.seq_len, 1)
        if self.seq_len * num == seq_len and num & (num - 1) == 0:
            return num
        legal = [str(seq_len >> k) for k in range(4) if seq_len % (1 << k) == 0]
        longer = (
            ". Sequences are packed once, at training.seq_len; to train on longer ones, start a new run from "
            "the weights of this one, with checkpoint.initial_load_path"
        )
        raise ConfigError(
            f"{self.seq_len} is not training.seq_len = {seq_len} divided by a power of 2: {', '.join(legal)}"
            f"{longer if self.seq_len > seq_len else ''}",
            "seq_len",
        )


def _check_weights(weights: Any) -> None:
    values = weights.values() if isinstance(weights, dict) else weights
    is_legal = isinstance(weights, (dict, list)) and all(
        type(value) in (int, float) and 0 <= value <= 1e9 for value in values
    )
    if not is_legal or not any(values):
        raise ConfigError(
            f"{weights!r} is neither a list of weights nor a table of weights by source, from 0 to 1e9 and "
            "not all 0",
            "weights",
        )


def settings_of(stage: Stage) -> dict[str, Any]:
    """Return what a stage sets, except for its place and its weights, as plain data for the run identity.
    Defaults are left out, so that a setting that is added later is no difference."""
    left_out, defaults = ("until", "name", "weights"), as_tree(Stage(until=END))
    tree = {key: value for key, value in as_tree(stage).items() if key not in left_out}
    return {key: value for key, value in tree.items() if value != defaults.get(key)}


def check_stages(stages: Sequence[Stage], training: Training, sources: Sequence[str]) -> None:
    """Raise ConfigError for a stage whose weights or sequence length do not fit the job, or that is not the
    last and has no end, and for a rule of a batch ramp that there is not. `sources`: the names of
    data.sources."""
    if training.batch_ramp_lr != "none" and not training.batch_ramp:
        raise ConfigError(
            f'"{training.batch_ramp_lr}" is a rule for [[training.batch_ramp]], which the job does not have',
            "training.batch_ramp_lr",
        )
    for i, stage in enumerate(stages):
        is_last = i == len(stages) - 1
        try:
            stage.weights_of(sources), stage.num_splits(training.seq_len)
            if is_last and stage.until != END:
                raise ConfigError(f'"{stage.until}": the last stage must have until = "{END}"', "until")
            if not is_last and stage.until == END:
                raise ConfigError(f'only the last stage has until = "{END}"', "until")
        except ConfigError as e:
            raise _in_stage(i, stage, e) from None


def check_sources_are_read(stages: Sequence[Stage], sources: dict[str, float]) -> None:
    """Raise ConfigError for a source with weight 0 to which no stage gives a weight. `sources`: the weights
    in data.sources, by the names of the sources."""
    weights = [stage.weights_of(list(sources)) or [] for stage in stages]
    for k, (name, weight) in enumerate(sources.items()):
        if not weight and not any(of_stage[k] for of_stage in weights if of_stage):
            raise ConfigError(
                f"0, and no stage gives {name} a weight; to exclude a source, delete its table",
                f"data.sources.{k}.weight",
            )


def _in_stage(i: int, stage: Stage, error: ConfigError) -> ConfigError:
    return ConfigError(f"{label(i, stage)}: {error}", f"stages.{i}.{error.key}")


def label(i: int, stage: Stage) -> str:
    """Return the stage's number, from 1, and its name, for messages."""
    return f"stage {i + 1}{f' ({stage.name})' if stage.name else ''}"


def uncounted_ends(stages: Sequence[Stage], training: Training) -> dict[str, Amount]:
    """Return the ends of stages and of the batch ramp that are not numbers of sequences yet, by their
    keys."""
    ends = {f"stages.{i}.until": stage.until for i, stage in enumerate(stages) if stage.until != END}
    ends |= {f"training.batch_ramp.{i}.until": entry.until for i, entry in enumerate(training.batch_ramp)}
    amounts = {key: Amount.parse(end) for key, end in ends.items()}
    return {key: amount for key, amount in amounts.items() if amount.unit != "sequences"}


def count_ends(
    training: Training, stages: Sequence[Stage], conversion: Conversion
) -> tuple[Training, list[Stage]]:
    """Return the section [training] and the stages with their ends as numbers of sequences, such as "1000000
    sequences". Raises ConfigError for an end that is not after the one before it."""
    ends = _counted([entry.until for entry in training.batch_ramp], "training.batch_ramp", conversion)
    ramp = [replace(entry, until=end) for entry, end in zip(training.batch_ramp, ends)]
    ends = _counted([stage.until for stage in stages[:-1]], "stages", conversion)
    return replace(training, batch_ramp=ramp), [
        replace(stage, until=end) for stage, end in zip(stages, [*ends, END])
    ]


def _counted(ends: Sequence[str], key: str, conversion: Conversion) -> list[str]:
    before, counted = 0, list[str]()
    for i, end in enumerate(ends):
        number = Amount.parse(end).sequences(conversion)
        if number <= before:
            begin = f'"{ends[i - 1]}", where it begins' if i else "the start of the run"
            raise ConfigError(
                f'"{end}" is sequence {number:,}, which is not after {begin}, sequence {before:,}',
                f"{key}.{i}.until",
            )
        if number >= 1 << 62:  # so that the numbers after it are int64, too
            raise ConfigError(
                f'"{end}" is 2^62 sequences or more, which cannot be counted', f"{key}.{i}.until"
            )
        counted.append(f"{number} sequences")
        before = number
    return counted


class Stages:
    """The stages of a run by position in the data order. A run without [[stages]] has one stage.

    The ends of `stages` and of training.batch_ramp are numbers of sequences, by `count_ends`.
    `scheduler`: the run's. `batch_size`: training.global_batch_size, with -1 resolved."""

    def __init__(self, stages: Sequence[Stage], training: Training, scheduler: LRScheduler, batch_size: int):
        self.stages, self.batch_size = list(stages) or [Stage(until=END)], batch_size
        self._training, self._scheduler = training, scheduler
        self.firsts = [0, *(_number(stage.until) for stage in self.stages[:-1])]
        self._ramp_firsts = [0, *(_number(entry.until) for entry in training.batch_ramp)]
        self.step_sizes = self._step_sizes()

    def __len__(self) -> int:
        return len(self.stages)

    def number_at(self, sequence: int) -> int:
        """Return the number, from 0, of the stage that a sequence belongs to."""
        return bisect_right(self.firsts, sequence) - 1

    def last_sequence(self, step: int, position: int, skipped: SkippedSequences) -> int:
        """Return the position in the data order after the last step of a run that has taken `step` steps and
        is at `position`."""
        num_left = max(self._training.steps - step, 0)
        taken = position - skipped.below(position).count()
        end = self.step_sizes.without(skipped).position_after(num_left, taken)
        return skipped.advance(position, end - taken)

    def lr_factor(self, step: int, sequence: int) -> float:
        """Return the factor of the peak learning rate in `step`, whose first sequence is `sequence`."""
        i, last_step = self.number_at(sequence), self._training.steps
        stage = self.stages[i]
        if stage.lr_scheduler is not None:
            before = self.steps_before(self.firsts[i])
            step_in_stage = self.steps_before(sequence) - before + 1
            # Not num_steps(i): with skipped sequences, or if the batch size was changed while the run was
            # stopped, the steps of a run are not those from sequence 0 on.
            num_steps = step_in_stage + max(last_step - step, 0)
            if i + 1 < len(self):
                planned = self.steps_before(self.firsts[i + 1]) - before
                # After skipped sequences, the last step may begin later than the last planned one.
                num_steps, step_in_stage = min(num_steps, planned), min(step_in_stage, planned)
            factor = stage.lr_scheduler.checked_factor(step_in_stage, num_steps)
        else:
            factor = self._scheduler.checked_factor(step, last_step)
        return factor * stage.lr_factor * self._ramp_factor(sequence)

    def count_schedules(self, conversion: Conversion) -> list[Stage]:
        """Return the stages with the amounts of training in their schedules as numbers of steps, counted from
        the first step of the stage. Raises ConfigError for an amount of less than one step."""
        counted = []
        for i, stage in enumerate(self.stages):
            first = self.step_sizes.position_after(self.steps_before(self.firsts[i]))
            sizes = self.step_sizes.starting_at(first)
            try:
                counted.append(resolve(stage, replace(conversion, step_sizes=sizes)))
            except ConfigError as e:
                raise _in_stage(i, stage, e) from None
        return counted

    @property
    def loss_changes(self) -> list[int]:
        """The first sequences of the stages that have other weights or another sequence length than the stage
        before, so that their losses cannot be compared."""
        stages = zip(self.stages, self.stages[1:], self.firsts[1:])
        return [
            first
            for before, stage, first in stages
            if (before.weights, before.seq_len) != (stage.weights, stage.seq_len)
        ]

    def describe(self, sources: Sequence[str]) -> list[str]:
        """Describe each stage in a line for the log; nothing for a run without stages. `sources`: the names
        of data.sources."""
        if len(self) == 1:
            return []
        lines = []
        for i, stage in enumerate(self.stages):
            num_steps, before = self.num_steps(i), self.steps_before(self.firsts[i])
            if not num_steps:
                last = self._training.steps
                ends = f"not reached, the run ends after {last:,} steps"
                lines.append(f"{label(i, stage)}: {'no step begins in it' if before < last else ends}")
                continue
            parts = [f"from sequence {self.firsts[i]:,}, steps {before + 1:,} to {before + num_steps:,}"]
            parts.append(self._describe_sizes(i))
            num_splits = stage.num_splits(self._training.seq_len)
            parts += [f"each sequence as {num_splits} of {stage.seq_len} tokens"] if num_splits > 1 else []
            if (weights := stage.weights_of(sources)) is not None:
                parts.append(f"weights {', '.join(f'{n} {w:g}' for n, w in zip(sources, weights))}")
            if stage.lr_scheduler is not None:
                parts.append(f"learning rate {stage.lr_scheduler.describe(num_steps)}")
            parts += [f"learning rate x {stage.lr_factor:g}"] if stage.lr_factor != 1 else []
            lines.append(f"{label(i, stage)}: {'; '.join(parts)}")
        return lines

    def _describe_sizes(self, i: int) -> str:
        """The batch sizes of stage `i`, such as `32 sequences per step, 64 from sequence 1,000 on`."""
        first, *later = self.sizes_of(i)
        places = [f", {size.global_batch_size} from sequence {size.first_sequence:,} on" for size in later]
        return f"{first.global_batch_size} sequences per step{''.join(places)}"

    def sizes_of(self, i: int) -> list[StepSize]:
        """Return the sizes of the steps of stage `i`, the first from its first sequence on."""
        first, end = self.firsts[i], self.end_of(i)
        later = [size for size in self.step_sizes.sizes if first < size.first_sequence < end]
        return [replace(self.step_sizes.at(first), first_sequence=first), *later]

    def end_of(self, i: int) -> float:
        """Return the number of the sequence with which the stage after stage `i` begins; infinite for the
        last stage."""
        return self.firsts[i + 1] if i + 1 < len(self) else math.inf

    def num_steps(self, i: int) -> int:
        """Return the number of steps of stage `i` in a run that skips no sequences."""
        last_step = self._training.steps
        end = self.steps_before(self.firsts[i + 1]) if i + 1 < len(self) else last_step
        return max(min(end, last_step) - self.steps_before(self.firsts[i]), 0)

    def steps_before(self, sequence: int) -> int:
        """Return the number of steps whose first sequence is below `sequence`, in a run that skips none."""
        whole = self.step_sizes.num_steps(sequence)
        return whole + (self.step_sizes.position_after(whole) < sequence)

    def check_schedules(self) -> None:
        """Raise ConfigError for a schedule that does not fit its stage."""
        for i, stage in enumerate(self.stages):
            if stage.lr_scheduler is not None and (num_steps := self.num_steps(i)):
                try:
                    stage.lr_scheduler.check(num_steps)
                    stage.lr_scheduler.check_factors(num_steps)
                except ConfigError as e:
                    raise _in_stage(i, stage, e) from None

    def _ramp_factor(self, sequence: int) -> float:
        size = self._ramp_size(sequence)
        power = RAMP_POWERS[self._training.batch_ramp_lr]
        return 1.0 if size is None else (size / self.batch_size) ** power

    def _ramp_size(self, sequence: int) -> int | None:
        """The batch size by training.batch_ramp; None after its end, and in a stage with a batch size of its
        own."""
        i = bisect_right(self._ramp_firsts, sequence) - 1
        is_over = i >= len(self._training.batch_ramp)
        if is_over or self.stages[self.number_at(sequence)].global_batch_size is not None:
            return None
        return self._training.batch_ramp[i].global_batch_size

    def _step_sizes(self) -> StepSizes:
        sizes: list[StepSize] = []
        for first in sorted({*self.firsts, *self._ramp_firsts}):
            stage = self.stages[self.number_at(first)]
            batch_size = stage.global_batch_size or self._ramp_size(first) or self.batch_size
            size = StepSize(first, batch_size, stage.num_splits(self._training.seq_len))
            if not sizes or replace(size, first_sequence=sizes[-1].first_sequence) != sizes[-1]:
                sizes.append(size)
        return StepSizes(sizes)


def _number(end: str) -> int:
    """The number in "1000000 sequences"."""
    amount = Amount.parse(end)
    assert amount.unit == "sequences", f"{end} is not counted"
    return int(amount.value)
