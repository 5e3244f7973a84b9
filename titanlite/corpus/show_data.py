"""titanlite data verify DATASET ... [--cache_dir=outputs/cache]   compare datasets with recorded hashes
titanlite data show DATASET [--sequence=N] [--packing=chunk] [--seq_len=2048] [--tokenizer.path=...]
titanlite data show CONFIG [--sequence=N] [--section.key=value ...] [--allow-imports]
titanlite data plan CONFIG [--ranks=N] [--json] [--section.key=value ...] [--allow-imports]

DATASET is a directory made by `titanlite prepare`, or the prefix of Megatron's PREFIX.bin and PREFIX.idx.
Megatron's files have no hash and no tokenizer: `verify` checks that the index matches its data, and compares
with the hash in the cache directory that a run or an earlier `verify` has recorded, or records it; without
--cache_dir only if outputs/cache is there. `show` needs --tokenizer.name, --tokenizer.path, ...

`show` prints sequences as text, document by document: sequence N of a dataset, or training sequence N of a
run. Of conversations, the tokens that count in the loss are between >>> and <<<. N is 0 by default;
--num-sequences=K prints K sequences from N on. CONFIG is a TOML file, a name in train_configs/, or a run
folder. If a run skips none, sequence N is in step N // global_batch_size + 1; with
[[stages]] or a batch ramp, the step and its stage are printed, and where the shorter sequences begin.
Sequences that a run skips, by data.skip_sequences or by its newest checkpoint, are marked. --allow-imports
runs the modules that the configuration imports.

`plan` prints what a run reads of each source in each stage: tokens, epochs and the numbers of the first and
last sequences, the steps with their batch size and learning rate, and when epochs end and max_epochs is
exceeded. Sequences are counted up to the boundary of a stage; a step that passes it belongs to the stage of
its first sequence. If the run folder of CONFIG holds a checkpoint that the job continues, the plan marks
where the run is. Text that is not tokenised yet is tokenised, as a run does at its start. --ranks is by
default the number of the newest checkpoint, or the fewest ranks that [parallelism] allows. If a run would
refuse the job, the plan ends with the reason and exit code 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.resume import newest
from titanlite.checkpoint.run_identity import STAGES
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_words
from titanlite.config.paths import PathText
from titanlite.corpus import plan_data
from titanlite.corpus.megatron import Content, MegatronFile, MegatronTokens
from titanlite.data.dataset import SequenceDataset, numbered
from titanlite.data.packing import PACKINGS, PackedSequences
from titanlite.data.remote_shards import open_tokens
from titanlite.data.sharded_tokens import ShardedTokens
from titanlite.data.skips import SkippedSequences
from titanlite.data.sources import short_names
from titanlite.job import Job, build_tokenizer, load_job
from titanlite.log import tell
from titanlite.options import take_flag, take_numbers
from titanlite.stages import Stages, check_stages, label
from titanlite.start import open_stages
from titanlite.tokenizers.base import Tokenizer, TokenizerConfig
from titanlite.tokenizers.tiktoken import Tiktoken
from titanlite.tools.verbs import shown_config

CACHE_DIR = "outputs/cache"  # the default of data.cache_dir


@dataclass(frozen=True, kw_only=True)
class Verify:
    """The key of `titanlite data verify` on the command line. `cache_dir`: of the runs that use Megatron's
    files; empty: outputs/cache, if it is there."""

    cache_dir: PathText = ""


@dataclass(frozen=True, kw_only=True)
class Show:
    """The keys of `titanlite data show DATASET` on the command line."""

    cache_dir: PathText = CACHE_DIR
    seq_len: int = 2048
    packing: Literal["chunk", "best_fit"] = "chunk"
    tokenizer: TokenizerConfig = field(default_factory=Tiktoken)


def main(argv: Sequence[str]) -> int:
    """Run the action `verify`, `show` or `plan`. A damaged dataset is a ConfigError (exit code 2)."""
    action, *rest = argv
    if action == "verify":
        return _verify(rest)
    if action == "show":
        return _show(rest)
    if action == "plan":
        return plan_data.main(rest)
    raise ConfigError(f"unknown action {action!r}{suggest(action, ['plan', 'show', 'verify'])}")


def _verify(argv: Sequence[str]) -> int:
    paths, overrides = split_words(argv)
    cache_dir = toml.build(Verify, *toml.read(None, overrides)).cache_dir
    if not paths:
        raise ConfigError("name at least one dataset: a directory that holds dataset.json, or a prefix")
    for path in paths:
        if _is_megatron(path):
            file = MegatronFile(path)
            content, compared = _verify_megatron(file, cache_dir)
            largest = f"largest id {content.largest_id}"
            counts = f"{file.num_documents:,} documents, {file.num_tokens:,} tokens"
            print(f"{path}: {counts}, {largest}, the index matches its data; {compared}")
        else:
            shards = open_tokens(path, Path(cache_dir or CACHE_DIR))
            shards.verify()
            print(f"{path}: {shards.counts()}, all hashes match")
    return 0


def _verify_megatron(file: MegatronFile, cache_dir: str) -> tuple[Content, str]:
    """Return the content of a file, and what it was compared with. A cache folder is only made if it is
    named: `verify` may be called in any folder."""
    record = file.record(Path(cache_dir or CACHE_DIR))
    if record.exists():
        return file.verify(record.parent), f"the content is that recorded in {record}"
    nothing = "nothing to compare the content with, because no run has used it"
    if cache_dir or record.parent.is_dir():
        return file.verify(record.parent), f"{nothing}: recorded in {record} for the next time"
    file.check_index()
    return file.read_content(), f"{nothing} here; --cache_dir=DIR names the cache of a run, or makes one"


def _is_megatron(path: str) -> bool:
    return Path(f"{path}.idx").exists() and not (Path(path) / "dataset.json").exists()


def _show(argv: Sequence[str]) -> int:
    allow, argv = take_flag(argv, ALLOW_IMPORTS)
    if not argv or argv[0].startswith("--"):
        raise ConfigError("name a dataset directory, a TOML file or a run folder whose sequences to show")
    path, overrides = argv[0], argv[1:]
    config = shown_config(path)
    own, overrides = take_numbers(overrides, ["sequence", "num_sequences"])
    first, num = own.get("sequence", 0), own.get("num_sequences", 1)
    if num < 1:
        raise ConfigError("command line, --num-sequences: 0 is not at least 1")
    numbers = range(first, first + num)
    if config is not None:
        job = load_job(config, overrides, None, allow)
        try:
            _show_run(job, numbers)
        except ConfigError as e:
            raise toml.read(config, overrides)[1].located(e) from None
        return 0
    packed, tokenizer = _open(path, overrides)
    if packed.shards.has_loss_mask:
        for line in filter(None, (packed.shards.counts(), packed.shards.warning)):
            print(f"{path}: {line}")
    for number in numbers:
        if number >= len(packed):
            raise ConfigError(
                f"{path} has {len(packed):,} sequences of {packed.seq_len} tokens, numbered from 0",
                "sequence",
            )
        print(f"==== sequence {number:,} of {len(packed):,}")
        _print_sequence(packed, number, tokenizer)
    return 0


def _show_run(job: Job, numbers: Sequence[int]) -> None:
    """Print training sequences of a run."""
    check_stages(job.stages, job.training, short_names(job.data.sources))
    tokenizer = build_tokenizer(job)
    sequences = numbered(job.data.build(tokenizer, seq_len=job.training.seq_len, seed=job.training.seed))
    stages = None
    if job.stages or job.training.batch_ramp:
        job, stages = open_stages(job, job.parallelism.fewest_ranks, sequences)
    skipped = _skipped(job, sequences)
    for line in sequences.describe_conversations(min(job.sequence_lengths().values())):
        print(line)
    for number in numbers:
        packed, local = sequences.origin(number)
        where, num_splits = _step_of(number, stages) if stages else ("", 1)
        mark = " (skipped)" if number in skipped else ""
        print(f"==== training sequence {number:,}{where}: sequence {local:,} of {packed.shards.path}{mark}")
        _print_sequence(packed, local, tokenizer, num_splits)


def _step_of(number: int, stages: Stages) -> tuple[str, int]:
    """The step of a training sequence and its stage, as text, and how many shorter sequences the sequence is
    trained as. A step belongs to the stage of its first sequence."""
    num_steps = stages.step_sizes.num_steps(number)
    first = stages.step_sizes.position_after(num_steps)
    i, own = stages.number_at(first), stages.number_at(number)
    drawn = f" (chosen by the weights of {label(own, stages.stages[own])})" if own != i else ""
    stage = f", {label(i, stages.stages[i])}{drawn}" if len(stages) > 1 else ""
    return f", step {num_steps + 1:,}{stage}", stages.step_sizes.at(first).num_splits


def _skipped(job: Job, sequences: SequenceDataset) -> SkippedSequences:
    """The sequences that a run skips, by its job and by the newest checkpoint in its folder, if
    the job numbers the sequences as the checkpoint's run does."""
    try:
        candidate = newest(job.folder / job.checkpoint.folder, -1, [])
    except CheckpointError as e:  # of another format
        tell(f"sequences that the run skips are marked from its configuration only: {e}")
        candidate = None
    if candidate is None:
        return job.data.skipped
    ours, theirs = job.identity(sequences.identity, sequences.names), candidate.train["identity"]
    if _numbering(ours, candidate.train["sequences"]) != _numbering(theirs, candidate.train["sequences"]):
        return job.data.skipped
    return job.data.skipped | SkippedSequences.merge(candidate.train["skipped"])


def _numbering(identity: dict[str, Any], num_sequences: int) -> list[Any]:
    """The part of an identity that decides which sequences the numbers below `num_sequences` have. Later
    stages may change in a run."""
    stages = [stage for stage in identity.get(STAGES, []) if 0 < stage["first_sequence"] < num_sequences]
    return [
        identity.get("training"),
        identity.get("data"),
        *((stage["first_sequence"], stage["sources"]) for stage in stages),
    ]


def _open(path: str, overrides: Sequence[str]) -> tuple[PackedSequences, Tokenizer]:
    tree, locator = toml.read(None, overrides)
    cache_dir = Path(tree.get("cache_dir", CACHE_DIR))
    prepared = None if _is_megatron(path) else open_tokens(path, cache_dir)
    if prepared:
        tree.setdefault("tokenizer", prepared.prepared.get("tokenizer", {}))
    elif "tokenizer" not in tree:
        raise ConfigError(f"{path} records no tokenizer: give --tokenizer.name, --tokenizer.path, ...")
    show = toml.build(Show, tree, locator)
    tokenizer = show.tokenizer.build()
    if prepared and prepared.tokenizer_fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"{path} was made with tokenizer {prepared.tokenizer_fingerprint}, this one is "
            f"{tokenizer.fingerprint}: select the right tokenizer with --tokenizer.name, --tokenizer.path, "
            "..."
        )
    shards = prepared or MegatronTokens([path], tokenizer.vocab_size, cache_dir)
    return PACKINGS[show.packing](shards, show.seq_len, cache_dir, True), tokenizer


def _print_sequence(packed: PackedSequences, number: int, tokenizer: Tokenizer, num_splits: int = 1) -> None:
    """Print the documents of a sequence. `num_splits`: it is trained as this many shorter sequences, whose
    beginnings are marked."""
    starts, lengths = packed.spans(number)
    length, place = packed.seq_len // num_splits, 0  # place: of the next token in the sequence
    for start, num_left in zip(starts.tolist(), lengths.tolist()):
        while num_left:
            if num_splits > 1 and place % length == 0 and place < packed.seq_len:
                print(f"---- shorter sequence {place // length + 1} of {num_splits}, {length:,} tokens")
            in_last = place >= packed.seq_len - length
            num = num_left if in_last else min(num_left, length - place % length)
            document, offset = packed.shards.locate(start)
            print(f"---- document {document:,}, tokens {offset:,} to {offset + num - 1:,}")
            print(_text(packed.shards, start, num, offset == 0, tokenizer))
            start, num_left, place = start + num, num_left - num, place + num
    if padding := packed.seq_len + 1 - int(lengths.sum()):
        print(f"---- {padding:,} tokens of padding")


def _text(shards: ShardedTokens, start: int, num_tokens: int, is_first: bool, tokenizer: Tokenizer) -> str:
    """Return the text of a range of tokens. If the dataset has a loss mask, the tokens that count as targets
    are between >>> and <<<. `is_first`: the range begins a document."""
    ids, mask = shards.read(start, num_tokens), shards.loss_mask(start, num_tokens)
    begins = [0] if mask is None else [0, *np.flatnonzero(np.diff(mask)) + 1]
    texts = []
    for begin, run in zip(begins, np.split(ids, begins[1:])):
        decode = tokenizer.decode if is_first and not begin else tokenizer.decode_continuation
        text = decode(run.tolist())
        texts.append(text if mask is None or not mask[begin] else f">>>{text}<<<")
    return "".join(texts)
