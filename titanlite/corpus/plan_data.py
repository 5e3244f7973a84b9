"""`titanlite data plan`: what a run reads of each source in each stage, and what runs out when.

All counts of sequences are exact, because the data order is a function of the configuration. Step numbers
assume that the run takes all its steps as configured and skips no sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from titanlite.checkpoint.resume import Candidate
from titanlite.checkpoint.start import check_run_identity, decide
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_arguments
from titanlite.data.dataset import SequenceDataset, numbered
from titanlite.data.reads import SourceReads
from titanlite.data.skips import SkippedSequences
from titanlite.data.sources import short_names
from titanlite.job import Job, load_job
from titanlite.log import tell
from titanlite.options import take_flag, take_numbers
from titanlite.stages import Stages
from titanlite.start import check_data, open_stages, open_tokenizer
from titanlite.table import table
from titanlite.tools.verbs import shown_config

MAX_EPOCHS = 10  # whose ends are listed, of each source


@dataclass(frozen=True)
class PlannedSource:
    """The sequences that a stage reads of a source. `first` and `last`: [epoch, sequence] in the source's own
    order, epochs from 1 and the sequences of an epoch from 0; None if none is read. `epochs_at_end`: read
    from the start of the run on."""

    source: str
    sequences: int
    share: float
    tokens: int
    epochs: float
    epochs_at_end: float
    first: tuple[int, int] | None
    last: tuple[int, int] | None


@dataclass(frozen=True)
class PlannedStage:
    """A stage. Its steps are those whose first sequence is in the stage. `batch_sizes`: [first sequence,
    sequences per step]. `learning_rates`: in the first and in the last step."""

    stage: int
    name: str
    first_sequence: int
    last_sequence: int
    sequences: int
    tokens: int
    first_step: int
    last_step: int
    steps: int
    batch_sizes: list[tuple[int, int]]
    seq_len: int
    learning_rates: tuple[float, float] | None
    sources: list[PlannedSource]


@dataclass(frozen=True)
class Place:
    """A training sequence, by its global number. `tokens`: up to its end, from the start of the run."""

    epoch: int
    sequence: int
    tokens: int
    step: int
    stage: int


@dataclass(frozen=True)
class SourceEnds:
    """When the epochs of a source end. `epoch_ends`: the last sequences of the first ten epochs.
    `exceeds_max_epochs`: the first sequence that is too much."""

    source: str
    sequences_per_epoch: int
    max_epochs: float
    sequences: int
    epochs: float
    epoch_ends: list[Place]
    exceeds_max_epochs: Place | None


@dataclass(frozen=True)
class Plan:
    """All sequences that a run reads. `at`: step, next sequence and stage of the newest checkpoint, and the
    step that a run would be at which takes all steps as configured; {} for a new run."""

    config: str
    ranks: int
    steps: int
    sequences: int
    tokens: int
    seq_len: int
    skipped_sequences: int
    at: dict[str, int]
    stages: list[PlannedStage]
    sources: list[SourceEnds]


def main(argv: Sequence[str]) -> int:
    """Print the plan of a job. Raises ConfigError, after the plan, if a run would refuse the job."""
    as_json, argv = take_flag(argv, "--json")
    allow, argv = take_flag(argv, ALLOW_IMPORTS)
    path, overrides = split_arguments(argv)
    config = shown_config(path) if path is not None else None
    if path is None or config is None:
        raise ConfigError(f"name a TOML file or a run folder to plan{f': {path} is neither' if path else ''}")
    own, overrides = take_numbers(overrides, ["ranks"])
    if own.get("ranks") == 0:
        raise ConfigError("command line, --ranks: 0 is below 1")
    job = load_job(config, overrides, None, allow)
    try:
        plan, refusal = _plan(job, path, own.get("ranks"))
    except ConfigError as e:
        raise toml.read(config, overrides)[1].located(e) from None
    print(json.dumps(asdict(plan), indent=1) if as_json else _text(plan))
    if refusal is not None:
        raise toml.read(config, overrides)[1].located(refusal)
    return 0


def _plan(job: Job, path: str, ranks: int | None) -> tuple[Plan, ConfigError | None]:
    """The plan, and why a run would refuse the job, if it would."""
    start = decide(job.checkpoint, job.folder)
    candidate = start.candidate
    if ranks is None:
        ranks = max(job.parallelism.fewest_ranks, candidate.manifest["ranks"] if candidate else 1)
    job.check(ranks)
    sequences = _open(job)
    job, stages = open_stages(job, ranks, sequences)
    refusal = None
    try:
        identity = job.identity(sequences.identity, sequences.names)
        check_run_identity(start, identity, job.checkpoint.allow_changed, job.folder)
    except ConfigError as e:  # the job cannot continue this run: plan a new one
        refusal, candidate = e, None
    try:
        check_data(job, stages, sequences, candidate.train if candidate else None)
    except ConfigError as e:
        refusal = refusal or e
    return _Planner(job, stages, sequences, candidate).plan(path, ranks), refusal


def _open(job: Job) -> SequenceDataset:
    """The job's data, which is tokenised and packed if it has not been before."""
    tokenizer, training = open_tokenizer(job), job.training
    sequences = job.data.check(tokenizer, seq_len=training.seq_len, seed=training.seed)
    if sequences is None:
        tell(f"opening the data as a run does: text is tokenised and packed once, into {job.data.cache_dir}")
        sequences = job.data.build(tokenizer, seq_len=training.seq_len, seed=training.seed)
    return numbered(sequences)


class _Planner:
    """Counts what a run reads. `job`: with its amounts resolved."""

    def __init__(self, job: Job, stages: Stages, sequences: SequenceDataset, candidate: Candidate | None):
        self.job, self.stages = job, stages
        order = short_names(job.data.sources)
        reads = dict(zip(sequences.source_names, sequences.reads()))
        self.reads = {name: reads[name] for name in order}
        self.at: dict[str, int] = {}
        step, position, skipped = 0, 0, job.data.skipped
        if candidate is not None:
            step, position = candidate.step, candidate.train["sequences"]
            skipped = skipped | SkippedSequences.merge(candidate.train["skipped"])
            self.at = {
                "step": step,
                "sequence": position,
                "stage": stages.number_at(position) + 1,
                "planned_step": stages.steps_before(position),
            }
        self.end = stages.last_sequence(step, position, skipped)
        self.num_skipped = skipped.below(self.end).count()

    def plan(self, path: str, ranks: int) -> Plan:
        """Return the plan."""
        return Plan(
            config=path,
            ranks=ranks,
            steps=self.job.training.steps,
            sequences=self.end,
            tokens=self.end * self.job.training.seq_len,
            seq_len=self.job.training.seq_len,
            skipped_sequences=self.num_skipped,
            at=self.at,
            stages=[self._stage(i) for i in range(len(self.stages))],
            sources=[self._ends(name, reads) for name, reads in self.reads.items()],
        )

    def _stage(self, i: int) -> PlannedStage:
        stages, training = self.stages, self.job.training
        first = stages.firsts[i]
        end = max(first, int(min(stages.end_of(i), self.end)))
        before, num_steps = stages.steps_before(first), stages.num_steps(i)
        sizes = [(size.first_sequence, size.global_batch_size) for size in stages.sizes_of(i)]
        return PlannedStage(
            stage=i + 1,
            name=stages.stages[i].name,
            first_sequence=first,
            last_sequence=end - 1,
            sequences=end - first,
            tokens=(end - first) * training.seq_len,
            first_step=before + 1,
            last_step=before + num_steps,
            steps=num_steps,
            batch_sizes=[size for size in sizes if size[0] < max(end, first + 1)],
            seq_len=training.seq_len // stages.stages[i].num_splits(training.seq_len),
            learning_rates=(self._rate(before + 1), self._rate(before + num_steps)) if num_steps else None,
            sources=[self._source(name, reads, first, end) for name, reads in self.reads.items()],
        )

    def _rate(self, step: int) -> float:
        position = self.stages.step_sizes.position_after(step - 1)
        return self.job.learning_rate(self.stages, step, position)

    def _source(self, name: str, reads: SourceReads, first: int, end: int) -> PlannedSource:
        before, after = reads.taken(first), reads.taken(end)
        places = [(n // reads.epoch + 1, n % reads.epoch) for n in (before, after - 1)]
        return PlannedSource(
            source=name,
            sequences=after - before,
            share=(after - before) / max(end - first, 1),
            tokens=(after - before) * self.job.training.seq_len,
            epochs=(after - before) / reads.epoch,
            epochs_at_end=reads.taken(min(end, self.end)) / reads.epoch,  # the run may end before the stage
            first=places[0] if after > before else None,
            last=places[1] if after > before else None,
        )

    def _ends(self, name: str, reads: SourceReads) -> SourceEnds:
        taken, exceeding = reads.taken(self.end), reads.exceeded_at(self.end)
        counts = range(reads.epoch, taken + 1, reads.epoch)[:MAX_EPOCHS]
        positions = [reads.position_after(count, self.end) for count in counts]
        return SourceEnds(
            source=name,
            sequences_per_epoch=reads.epoch,
            max_epochs=reads.source.max_epochs,
            sequences=taken,
            epochs=taken / reads.epoch,
            epoch_ends=[self._place(reads, position - 1) for position in positions if position],
            exceeds_max_epochs=None if exceeding is None else self._place(reads, exceeding),
        )

    def _place(self, reads: SourceReads, sequence: int) -> Place:
        return Place(
            epoch=reads.taken(sequence) // reads.epoch + 1,
            sequence=sequence,
            tokens=(sequence + 1) * self.job.training.seq_len,
            step=self.stages.step_sizes.num_steps(sequence) + 1,
            stage=self.stages.number_at(sequence) + 1,
        )


def _text(plan: Plan) -> str:
    """The plan as tables."""
    parts = [_head(plan), _stages(plan), _sources(plan), _what_ends(plan)]
    return "\n\n".join(parts)


def _head(plan: Plan) -> str:
    ranks = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    lines = [
        f"{plan.config} on {ranks}: {plan.steps:,} steps, {plan.sequences:,} sequences of {plan.seq_len:,} "
        f"tokens, {plan.tokens:,} tokens"
    ]
    if plan.skipped_sequences:
        lines.append(
            f"{plan.skipped_sequences:,} of the sequences are skipped: they count as read, and steps after "
            "them reach further than listed"
        )
    if plan.at:
        step, planned, sequence = (plan.at[key] for key in ("step", "planned_step", "sequence"))
        lines.append(f"the run has taken {step:,} steps and continues with sequence {sequence:,}")
        if step != planned:
            lines.append(
                f"the steps below are those of a run that has taken {planned:,} steps to this sequence: this "
                "one has skipped sequences or had other batch sizes"
            )
    return "\n".join(lines)


def _stages(plan: Plan) -> str:
    head = ["stage", "sequences", "to", "steps", "to", "tokens", "seq_len", "learning rate", "to", "per step"]
    rows = [[*head, ""]]
    for stage in plan.stages:
        (_, size), *later = stage.batch_sizes
        sizes = [f"{size:,}", *(f"{size:,} from {first:,}" for first, size in later)]
        rates = [f"{rate:.3g}" for rate in stage.learning_rates or ()]
        steps = [f"{stage.first_step:,}", f"{stage.last_step:,}"] if stage.steps else []
        rows.append(
            [
                f"{stage.stage} {stage.name}",
                f"{stage.first_sequence:,}",
                f"{stage.last_sequence:,}" if stage.sequences else "not reached",
                *(steps or ["-", "-"]),
                f"{stage.tokens:,}",
                f"{stage.seq_len:,}",
                *(rates or ["-", "-"]),
                ", ".join(sizes),
                "<- now" if plan.at.get("stage") == stage.stage else "",
            ]
        )
    return table(rows, num_texts=1)


def _sources(plan: Plan) -> str:
    head = ["source", "stage", "share", "sequences", "tokens", "epochs", "so far", "first (epoch: number)"]
    rows = [[*head, "last"]]
    for i, ends in enumerate(plan.sources):
        for stage in plan.stages:
            source = stage.sources[i]
            places = [f"{epoch}: {number:,}" for epoch, number in filter(None, (source.first, source.last))]
            rows.append(
                [
                    ends.source,
                    f"{stage.stage} {stage.name}",
                    f"{source.share:.1%}",
                    f"{source.sequences:,}",
                    f"{source.tokens:,}",
                    f"{source.epochs:.3f}",
                    f"{source.epochs_at_end:.3f}",
                    *(places or ["-", "-"]),
                ]
            )
    return table(rows, num_texts=2)


def _what_ends(plan: Plan) -> str:
    rows, notes = [["source", "what ends", "sequence", "step", "stage", "tokens"]], list[str]()
    for source in plan.sources:
        events = [(f"epoch {place.epoch} ends", place) for place in source.epoch_ends]
        if (place := source.exceeds_max_epochs) is not None:
            events.append((f"max_epochs = {source.max_epochs:g} is exceeded", place))
        for event, place in events:
            numbers = (place.sequence, place.step, place.stage, place.tokens)
            rows.append([source.source, event, *(f"{number:,}" for number in numbers)])
        if source.epochs >= MAX_EPOCHS + 1:
            notes.append(f"{source.source}: {int(source.epochs):,} epochs end in all")
    if len(rows) == 1:
        return "no epoch of a source ends"
    return "\n".join([table(rows, num_texts=2), *notes])
