"""The section `[data]` and the sequences of a run: opens the sources, mixes them and holds out validation
sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from titanlite.config.component import ConfigError, check_at_least, keys_in
from titanlite.config.paths import PathText
from titanlite.data.batch import Batch, MicroBatch
from titanlite.data.held_out import HeldOut, HeldOutSource, ValidationSequences, read
from titanlite.data.loader import Loader, MicroBatches, SequenceLoader
from titanlite.data.order import MIXING_BLOCK, Mixture, key_of, quotas, shuffled, unshuffled
from titanlite.data.packing import PACKINGS, ChunkedSequences, PackedSequences, TokenSequence
from titanlite.data.reads import SourceReads
from titanlite.data.remote_shards import RemoteTokens, load
from titanlite.data.sequence_cache import SequenceCache
from titanlite.data.skips import SkippedSequences, checked_range
from titanlite.data.sources import Source, short_names
from titanlite.data.step_sizes import StepSizes
from titanlite.data.stream_sequences import StreamSequences, check_stream
from titanlite.data.stream_source import Stream
from titanlite.errors import LoaderError
from titanlite.tokenizers.base import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data: a weighted mixture of sources, packed into sequences."""

    sources: list[Source]
    """Sources to train on, one `[[data.sources]]` table each."""
    validation_sources: list[Source] = field(default_factory=list)
    """Sources to validate on, one `[[data.validation_sources]]` table each. If their weights differ,
    eval/loss is the mean of the sources' losses by weight; otherwise it is the mean over all tokens."""
    holdout_sequences: int = 0
    """Sequences held out for validation, from all sources by weight, and never trained on. Not with
    validation_sources."""
    skip_sequences: list[list[int]] = field(default_factory=list)
    """Ranges `[FIRST, LAST]` of sequence numbers never to train on, ends included: `[[96, 111], [400, 415]]`;
    not yet trained on."""
    packing: Literal["chunk", "best_fit"] = "chunk"
    """`chunk`: split the concatenated documents every seq_len tokens. `best_fit`: put whole documents
    together, and split only documents longer than a sequence."""
    mask_documents: bool = False
    """Restrict attention to the same document, and restart positions at 0 in each."""
    num_workers: int = 2
    """Loader processes per rank; 0: the training process loads. Only a stream's order depends on it."""
    cache_dir: PathText = "outputs/cache"
    """Folder for packing indices, tokens of sources that tokenise on first use, and the cache of sources on a
    storage; on a local disk."""
    cache_gib: float = 100.0
    """Most GiB per node for sequences of sources on a storage, such as s3://bucket/corpus."""
    verify: Literal["sizes", "full"] = "sizes"
    """Check of the shards at start: file sizes, or the SHA-256 of every file."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("no source to train on: give at least one [[data.sources]]", "sources")
        if not any(source.weight for source in self.sources):
            raise ConfigError("no source has a weight above 0", "sources")
        for i, source in enumerate(self.validation_sources):
            if not source.weight:
                raise ConfigError(
                    "0; to exclude a source, delete its table", f"validation_sources.{i}.weight"
                )
            if isinstance(source, Stream):
                raise ConfigError(
                    "a stream can only be trained on, as the only one of data.sources; to validate on its "
                    "documents, make shards of them: titanlite prepare, [from_stream]",
                    f"validation_sources.{i}.name",
                )
        if self.holdout_sequences and self.validation_sources:
            raise ConfigError("cannot be combined with validation_sources", "holdout_sequences")
        check_at_least(self, 0, "holdout_sequences", "num_workers")
        if not 0 < self.cache_gib < 1 << 30:
            raise ConfigError(f"{self.cache_gib} is not a size in GiB above 0", "cache_gib")
        for i, numbers in enumerate(self.skip_sequences):
            try:
                checked_range(numbers)
            except ValueError as e:
                raise ConfigError(str(e), f"skip_sequences.{i}") from None
        if self.stream is not None:
            check_stream(
                num_sources=len(self.sources),
                holdout_sequences=self.holdout_sequences,
                skip_sequences=self.skip_sequences,
                packing=self.packing,
            )

    @property
    def stream(self) -> Stream | None:
        """The stream that the run trains on; None if its sequences have numbers."""
        return next((source for source in self.sources if isinstance(source, Stream)), None)

    @property
    def uses_cache(self) -> bool:
        """Whether a first run with this data writes to `cache_dir`."""
        sources = [*self.sources, *self.validation_sources]
        return self.packing == "best_fit" or any(source.uses_cache for source in sources)

    @property
    def skipped(self) -> SkippedSequences:
        """The sequences of `skip_sequences`."""
        return SkippedSequences.merge(self.skip_sequences)

    def build(self, tokenizer: Tokenizer, *, seq_len: int, seed: int) -> RunSequences:
        """Open the sources, and tokenise raw text on first use. Raises ConfigError for unusable
        input."""
        sequences = self._build(tokenizer, seq_len, seed)
        for shards in sequences.remote:
            shards.materialise()
        return sequences

    def _build(self, tokenizer: Tokenizer, seq_len: int, seed: int) -> RunSequences:
        packed = self._open([] if self.stream else self.sources, tokenizer, seq_len, "data.sources")
        held_out = self._open(self.validation_sources, tokenizer, seq_len, "data.validation_sources")
        for_validation = {sequences.fingerprint for sequences in held_out}
        if both := [sequences for sequences in packed if sequences.fingerprint in for_validation]:
            path = both[0].shards.path
            raise ConfigError(f"{path} is also a training source", "data.validation_sources")
        identity = self.label_identity(tokenizer, seq_len=seq_len, seed=seed)
        validation = _sorted_by_content(held_out, self.validation_sources)
        if self.stream is not None:
            with keys_in("data.sources.0"):
                return StreamSequences(self.stream, tokenizer, _for_validation(validation), identity)
        training = _sorted_by_content(packed, self.sources)
        sequences = SequenceDataset(training, validation, self.holdout_sequences, seed, identity)
        sequences.set_stages(self.sources, [(0, None)])
        return sequences

    def label_identity(self, tokenizer: Tokenizer, *, seq_len: int, seed: int) -> dict[str, Any]:
        """Return the identity of the sequences as known before the sources are opened: `sources` lists the
        sources' labels instead of fingerprints of their contents. The order of a stream does not depend on
        the seed."""
        return {
            **({"seed": seed} if self.stream is None else {"streamed": True}),
            "seq_len": seq_len,
            "packing": self.packing,
            "mask_documents": self.mask_documents,
            "holdout_sequences": self.holdout_sequences,
            "tokenizer": tokenizer.fingerprint,
            "sources": sorted(source.label for source in self.sources),
        }

    def check(self, tokenizer: Tokenizer, *, seq_len: int, seed: int) -> RunSequences | None:
        """Raise the ConfigErrors of `build` that are detectable without tokenising, packing or hashing.
        Returns the result of `build`, or None if `build` would have to tokenise, pack or hash."""
        sources = [] if self.stream else self.sources  # `build` does not read all of a stream
        is_ready = _for_each(lambda source: source.check(tokenizer), sources, "data.sources")
        is_ready += _for_each(
            lambda source: source.check(tokenizer), self.validation_sources, "data.validation_sources"
        )
        if not all(is_ready) or self.packing != "chunk":
            return None
        return replace(self, verify="sizes")._build(tokenizer, seq_len, seed)

    def _open(
        self, sources: Sequence[Source], tokenizer: Tokenizer, seq_len: int, key: str
    ) -> list[PackedSequences]:
        shards = _for_each(lambda source: source.build(tokenizer, Path(self.cache_dir)), sources, key)
        for dataset in shards if self.verify == "full" else []:
            dataset.verify()
        for dataset in shards if self.packing != "chunk" else []:  # the packing index is made of the indices
            if isinstance(dataset, RemoteTokens):
                dataset.materialise()
        if len({dataset.fingerprint for dataset in shards}) < len(shards):
            raise ConfigError("two sources have the same tokens; merge them and add their weights", key)
        pack = PACKINGS[self.packing]
        return [pack(dataset, seq_len, Path(self.cache_dir), self.mask_documents) for dataset in shards]


def _sorted_by_content(
    packed: Sequence[PackedSequences], sources: Sequence[Source]
) -> list[tuple[PackedSequences, Source]]:
    """Sort the sources by content."""
    return sorted(zip(packed, sources), key=lambda pair: pair[0].fingerprint)


def _for_each(call: Callable[[Source], T], sources: Sequence[Source], key: str) -> list[T]:
    """Call `call` with each source and return the results. Keys of ConfigErrors, which are relative to the
    source, get the prefix `KEY.NUMBER.`"""
    results = []
    for i, source in enumerate(sources):
        with keys_in(f"{key}.{i}"):
            results.append(call(source))
    return results


class SequenceDataset(ValidationSequences, Dataset):
    """All sequences of a run by global number: `training`, whose numbers are unlimited, and `held_out`.

    The held-out sequences depend on the sources' contents and weights only, so runs with other seeds validate
    on the same sequences. `identity`: everything that determines training sequence g. A run cannot resume
    with another identity. `epoch_sequences`: number of training sequences of all sources together. `names`:
    the sources' labels, for messages, by their fingerprints in `identity`. `source_names`: short names, for
    metrics."""

    def __init__(
        self,
        sources: Sequence[tuple[PackedSequences, Source]],
        validation: Sequence[tuple[PackedSequences, Source]],
        holdout: int,
        seed: int,
        identity: dict[str, Any],
    ):
        self.packed, self._sources = [p for p, _ in sources], [s for _, s in sources]
        self._weights = [source.weight for source in self._sources]
        shares = self._shares(self._weights, "data.sources")
        held = quotas(shares, holdout)  # from the shares, so that equal identities hold out equal sequences
        for packed, num_held in zip(self.packed, held):
            if num_held >= len(packed):
                raise ConfigError(
                    f"cannot hold out {num_held} sequences of {packed.shards.path}, which has {len(packed)}",
                    "data.holdout_sequences",
                )
        self._held = held
        if validation:
            for_validation = _for_validation(validation)
        else:  # the numbers held out are by weight
            for_validation = _held_out("holdout", sources, held, [1.0] * len(held))
        super().__init__(for_validation, self.packed[0].seq_len, identity["mask_documents"])
        self.sizes = [len(packed) - num_held for packed, num_held in zip(self.packed, held)]
        self.epoch_sequences = sum(self.sizes)
        self.names = {packed.fingerprint: source.label for packed, source in sources}
        self.source_names = short_names(self._sources)
        self._seed, self._holdout = seed, holdout
        self._label_identity = identity
        self.cache: SequenceCache | None = None

    def set_stages(
        self, sources: Sequence[Source], stages: Sequence[tuple[int, Sequence[float] | None]]
    ) -> None:
        """Set the weights of the sources from each stage's first sequence on; the first stage begins with 0.
        None: the sources' own weights. The weights are in the order of `sources`, which are all sources of
        the dataset. Raises ConfigError for a weight that is too small."""
        self._places = places = [sources.index(source) for source in self._sources]
        shares = []
        for i, (_, weights) in enumerate(stages):
            own = self._weights if weights is None else [weights[place] for place in places]
            shares.append(self._shares(own, "data.sources" if weights is None else f"stages.{i}.weights"))
        self._stage_firsts = [first for first, _ in stages]
        fingerprints = [packed.fingerprint for packed in self.packed]
        changes = [(first, share) for (first, _), share in zip(stages[1:], shares[1:])]
        self._mixture = Mixture(self.sizes, fingerprints, shares[0], self._seed, changes)
        self._blocks: dict[int, np.ndarray] = {}
        by_content = [{uid: share for uid, share in zip(fingerprints, stage) if share} for stage in shares]
        self.identity = {**self._label_identity, "sources": by_content[0]}
        if len(stages) > 1:
            self.identity["stages"] = [
                {"first_sequence": first, "sources": shares} for (first, _), shares in zip(stages, by_content)
            ]
        if self._held != quotas(shares[0], self._holdout):
            self.identity["held_out"] = {uid: held for uid, held in zip(fingerprints, self._held) if held}

    def _shares(self, weights: Sequence[float], key: str) -> list[int]:
        """Return the sources' sequences in a mixing block."""
        shares = quotas(weights, MIXING_BLOCK)
        for packed, weight, share in zip(self.packed, weights, shares):
            if weight and not share:
                raise ConfigError(
                    f"{packed.shards.path}: the weight {weight:g} is too small a share of {sum(weights):g}; "
                    f"the smallest share is 1/{MIXING_BLOCK}. Raise the weight or remove the source",
                    key,
                )
        return shares

    def check_resumed(self, train: Mapping[str, Any] | None) -> None:
        """Do nothing: a run continues its numbered sequences on any layout."""

    def loader(
        self,
        rank: int,
        step_sizes: StepSizes,
        *,
        first_sequence: int,
        skipped: SkippedSequences,
        stream_state: Mapping[str, Any],
        pin_memory: bool,
    ) -> Loader[Any]:
        """Return the loader of a data-parallel rank's micro-batches, which begins at the position
        `first_sequence`. `stream_state`: of a checkpoint, for a stream."""
        micro_batches = MicroBatches(
            first_sequence=first_sequence,
            step_sizes=step_sizes,
            micro_batch_size=self.layout.micro_batch_size,
            rank=rank,
            num_ranks=self.layout.num_ranks,
            skipped=skipped,
        )
        return SequenceLoader(self, micro_batches, self.layout.num_workers, pin_memory)

    def describe_size(self) -> str:
        """Return how much there is to train on, for the log."""
        return f"{self.epoch_sequences:,} sequences of {self.seq_len} tokens to train on"

    def shares(self) -> list[dict[str, Any]]:
        """The sources as plain data: label, share of the training sequences, and number of sequences in an
        epoch; if the shares change, also [first sequence, share] from each change on."""
        stages = self._mixture.stages
        entries: list[dict[str, Any]] = []
        for k, (source, size) in enumerate(zip(self._sources, self.sizes)):
            shares = [[stage.first, stage.quotas[k] / MIXING_BLOCK] for stage in stages]
            entry = {"source": source.label, "share": shares[0][1], "sequences": size}
            entries.append(entry | ({"stages": shares} if len(stages) > 1 else {}))
        return entries

    def reads(self) -> list[SourceReads]:
        """How much a run reads of each source, in the order of `source_names`."""
        return [SourceReads(source, self._mixture, k) for k, source in enumerate(self._sources)]

    def describe(self, num_sequences: int) -> list[str]:
        """Describe the share and the epochs of each source in a run through the first `num_sequences`
        sequences of the data order, skipped ones included, one line per source. Raises ConfigError if the run
        reads a source for more than its max_epochs."""
        lines = []
        for packed, reads, table in zip(self.packed, self.reads(), self._places):
            taken, size = reads.taken(num_sequences), reads.epoch
            epochs, share = taken / size, taken / max(num_sequences, 1)
            padding = f", {packed.padding_share:.2%} padding" if packed.padding_share else ""
            said = f"{share:.1%} of the sequences, {epochs:.2f} epochs of {size:,}{padding}"
            lines.append(f"{packed.shards.path}: {said}")
            if (enough := reads.exceeded_at(num_sequences)) is not None:
                stage = bisect_right(self._stage_firsts, enough)
                place = f" (in stage {stage})" if len(self._stage_firsts) > 1 else ""
                raise ConfigError(
                    f"{packed.shards.path}: the run would read {epochs:.2f} epochs, more than max_epochs = "
                    f"{reads.source.max_epochs:g}. Lower training.steps to end within the first {enough:,} "
                    f"of the {num_sequences:,} sequences{place}, or lower the source's weight",
                    f"data.sources.{table}.max_epochs",
                )
        return lines

    def describe_conversations(self, seq_len: int) -> list[str]:
        """Describe the conversations of each source that has any: how many of their tokens are trained, a
        warning if the ends of answers are not, and whether sequences cut them. The later part of a
        conversation that is cut is trained without its question. `seq_len`: the shortest one of all
        stages."""
        masked = [packed for packed in self.packed if packed.shards.has_loss_mask]
        lines = [(p.shards.counts(), p.shards.warning, _reason_for_cuts(p, seq_len)) for p in masked]
        return [f"{p.shards.path}: {line}" for p, said in zip(masked, lines) for line in said if line]

    def training(self, numbers: np.ndarray) -> list[TokenSequence]:
        """Return training sequences by global number (int64 [n])."""
        origins = [self.origin(int(number)) for number in numbers]
        load(origins)
        return [read(*origin, "", number) for number, origin in zip(numbers, origins)]

    def origin(self, number: int) -> tuple[PackedSequences, int]:
        """Return the source of a training sequence, and the sequence's number in that source."""
        k, local_number = self._mixing_block(number // MIXING_BLOCK)[:, number % MIXING_BLOCK].tolist()
        return self.packed[k], local_number

    def next_uses(
        self,
        packed: PackedSequences,
        numbers: np.ndarray,
        position: int,
        is_taken: Callable[[np.ndarray], np.ndarray],
        end: int,
    ) -> np.ndarray:
        """Return the number of the next training sequence, from `position` on, that each sequence of a source
        (int64 [n], by its number in the source) is. `is_taken`: tells which training sequences count, if
        their numbers are below `end`. -1 for sequences to validate on."""
        uses = np.full(len(numbers), -1)
        if packed not in self.packed:
            return uses
        k = self.packed.index(packed)
        local = unshuffled(numbers, len(packed), packed.fingerprint) - self._held[k]
        left, taken = np.flatnonzero(local >= 0), self._mixture.taken(position)[k]
        before = np.full(len(numbers), taken)
        while len(left):
            before[left], uses[left] = self._mixture.next_use(k, local[left], before[left])
            before[left] += 1
            left = left[(uses[left] < end) & ~is_taken(uses[left])]
        return uses

    def use_cache(self, cache: SequenceCache) -> None:
        """Read the sequences of remote sources from a cache, which a Downloader fills."""
        self.cache = cache
        for shards in self.remote:
            shards.cache = cache

    @property
    def remote(self) -> list[RemoteTokens]:
        training = [packed.shards for packed in self.packed]
        return [*super().remote, *(dataset for dataset in training if isinstance(dataset, RemoteTokens))]

    def source_ids(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the source of each training sequence, by its place in `source_names`, int64 [n]."""
        ids = [int(self._mixing_block(n // MIXING_BLOCK)[0, n % MIXING_BLOCK]) for n in numbers]
        return torch.tensor(ids, dtype=torch.int64)

    def _mixing_block(self, b: int) -> np.ndarray:
        """Return the source of each training sequence in a mixing block, and its number in that source: int64
        [2, MIXING_BLOCK]. Permuting a thousand numbers costs little more than permuting a single number, so
        whole blocks are computed, and the last few are cached."""
        if b not in self._blocks:
            numbers = np.arange(b * MIXING_BLOCK, (b + 1) * MIXING_BLOCK)
            source_index, local_numbers = self._mixture.locate(numbers)
            local_numbers = self._shuffled(source_index, local_numbers + np.array(self._held)[source_index])
            self._blocks[b] = np.stack([source_index, local_numbers])
            if len(self._blocks) > 4:
                self._blocks.pop(next(iter(self._blocks)))
        return self._blocks[b]

    def _shuffled(self, source_index: np.ndarray, local_numbers: np.ndarray) -> np.ndarray:
        """Shuffle the sequences of each source by a key of its content.

        There are two permutations: this one is the same for all seeds and sets the first sequences aside for
        validation. Mixture's permutation, keyed by seed and epoch, orders all others."""
        result = np.empty_like(local_numbers)
        for k in np.unique(source_index):
            packed, mask = self.packed[k], source_index == k
            result[mask] = shuffled(local_numbers[mask], len(packed), packed.fingerprint)
        return result

    def __getitems__(self, micro_batch: MicroBatch) -> Batch | ConfigError | LoaderError:
        numbers, num_splits = micro_batch
        try:
            batch = self.batch(numbers, self.training(np.asarray(numbers)))
            return replace(batch, source_ids=self.source_ids(numbers)).split(num_splits)
        except (ConfigError, LoaderError) as e:
            # torch would add the worker's traceback, so SequenceLoader raises the error.
            return e


RunSequences = SequenceDataset | StreamSequences


def numbered(sequences: RunSequences) -> SequenceDataset:
    """Return the sequences of a run, for programs that look them up by number. Raises ConfigError for a
    stream."""
    if isinstance(sequences, SequenceDataset):
        return sequences
    raise ConfigError(
        "the sequences of a stream cannot be looked up or counted before they are read; make shards of the "
        "stream to show and plan them: titanlite prepare, [from_stream]",
        "data.sources.0.name",
    )


def _reason_for_cuts(packed: PackedSequences, seq_len: int) -> str:
    """Say why conversations of a source are cut in sequences of `seq_len` tokens; "" if none is."""
    if isinstance(packed, ChunkedSequences):
        return (
            'packing = "chunk" cuts a conversation at the end of every sequence; packing = "best_fit" with '
            "mask_documents = true keeps conversations whole"
        )
    if seq_len < packed.seq_len:
        return f"a stage with seq_len = {seq_len} cuts a conversation at the end of every sequence"
    max_tokens = packed.seq_len + 1
    if not (num_longer := packed.shards.num_longer_than(max_tokens)):
        return ""
    return (
        f"{num_longer:,} of {packed.shards.num_documents:,} conversations have more than seq_len + 1 = "
        f"{max_tokens} tokens and are cut; to leave them out, give max_tokens = {max_tokens} to the source "
        "`chat`, or to `titanlite prepare`"
    )


def _for_validation(sources: Sequence[tuple[PackedSequences, Source]]) -> HeldOut:
    """All sequences of validation_sources."""
    sizes, weights = [len(packed) for packed, _ in sources], [source.weight for _, source in sources]
    return _held_out("validation", sources, sizes, weights)


def _held_out(
    purpose: str,
    sources: Sequence[tuple[PackedSequences, Source]],
    sizes: Sequence[int],
    weights: Sequence[float],
) -> HeldOut:
    """The sequences to validate on: `sizes` sequences of each source. `purpose`: of the order in each
    source."""
    names = short_names([source for _, source in sources])
    keys = [key_of(purpose, packed.fingerprint) for packed, _ in sources]
    columns = zip(names, [packed for packed, _ in sources], keys, sizes, weights)
    return HeldOut([HeldOutSource(*column) for column in columns])
