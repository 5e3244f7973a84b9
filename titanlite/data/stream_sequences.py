"""StreamSequences: the sequences of a run that trains on a stream, and the rules for such a run.

The sequences are made while the stream is read, and have no place that can be looked up before. So a stream
is a run's only source of training, and whatever needs to find or count sequences is refused: sequences that
are held out or skipped, weights, epochs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from titanlite.config.amount import Amount
from titanlite.config.component import ConfigError, Unreadable
from titanlite.data.held_out import HeldOut, ValidationSequences
from titanlite.data.order import MIXING_BLOCK
from titanlite.data.skips import SkippedSequences
from titanlite.data.sources import Source, short_names
from titanlite.data.step_sizes import StepSizes
from titanlite.data.stream_batches import TokenStream, describe_document, has_own_shards
from titanlite.data.stream_loader import StreamLoader
from titanlite.data.stream_source import Stream
from titanlite.tokenizers.base import Tokenizer

SHARDS = "make shards of the stream, which have no such limit: titanlite prepare, [from_stream]"
FIRST_DOCUMENTS = 100  # of which one must have text, if bad documents are skipped
LAYOUT_NAMES = {
    "num_ranks": "data-parallel ranks",
    "num_workers": "data.num_workers",
    "micro_batch_size": "training.local_batch_size",
}


def check_stream(
    *,
    num_sources: int,
    holdout_sequences: int,
    skip_sequences: Sequence[Sequence[int]],
    packing: str,
) -> None:
    """Raise ConfigError for keys of [data] that a stream does not support."""
    if num_sources > 1:
        raise ConfigError(
            f"a stream cannot be mixed with other sources: give it alone, or {SHARDS}", "sources"
        )
    if holdout_sequences:
        raise ConfigError(
            "no sequences of a stream can be held out: set it to 0 and give data.validation_sources, or "
            f"{SHARDS}",
            "holdout_sequences",
        )
    if skip_sequences:
        raise ConfigError(f"sequences of a stream cannot be skipped by number; {SHARDS}", "skip_sequences")
    if packing != "chunk":
        raise ConfigError(f'a stream is packed by "chunk"; for {packing!r}, {SHARDS}', "packing")


def check_streamed_run(weighted_stages: Sequence[int], amounts: Mapping[str, Amount], rewinds: bool) -> None:
    """Raise ConfigError for settings outside [data] that a stream does not support. `weighted_stages`: the
    numbers, from 0, of the stages that set weights. `amounts`: of training, by key. `rewinds`: whether the
    run may rewind after a spike."""
    if weighted_stages:
        raise ConfigError(
            f"a stream is the only source, so there is nothing to weigh; remove the weights, or {SHARDS}",
            f"stages.{weighted_stages[0]}.weights",
        )
    for key, amount in amounts.items():
        if amount.unit == "epochs":
            raise ConfigError(
                f'"{amount}": the length of an epoch of a stream is not known; give steps, tokens or '
                f"sequences, or {SHARDS}",
                key,
            )
    if rewinds:
        raise ConfigError(
            f'"rewind" skips sequences, which a stream cannot; set "log" or "stop", or {SHARDS}',
            "guard.on_spike",
        )


class StreamSequences(ValidationSequences):
    """The sequences of a run that trains on a stream. Opening reads the first document; raises ConfigError
    for a stream without documents, or without text in the first one. Its keys are relative to the source.

    `identity`: what determines the documents and how they become sequences. `layout`: which sequences the
    documents become, besides. `names`, `source_names`: as in SequenceDataset."""

    epoch_sequences = None  # not known

    def __init__(
        self, source: Stream, tokenizer: Tokenizer, for_validation: HeldOut, identity: dict[str, Any]
    ):
        super().__init__(for_validation, identity["seq_len"], identity["mask_documents"])
        self._source, fingerprint = source, source.fingerprint()
        self.names, self.source_names = {fingerprint: source.label}, short_names([source])
        self._documents = _checked_documents(source)
        self._tokens = TokenStream(source, tokenizer, self.seq_len, identity["mask_documents"])
        self._shares = {fingerprint: MIXING_BLOCK}
        self.identity = {**identity, "sources": self._shares}

    def set_stages(
        self, sources: Sequence[Source], stages: Sequence[tuple[int, Sequence[float] | None]]
    ) -> None:
        """Record the first sequences of the stages in `identity`, as SequenceDataset.set_stages does."""
        self.identity.pop("stages", None)
        if len(stages) > 1:
            self.identity["stages"] = [
                {"first_sequence": first, "sources": self._shares} for first, _ in stages
            ]

    def loader(
        self,
        rank: int,
        step_sizes: StepSizes,
        *,
        first_sequence: int,
        skipped: SkippedSequences,
        stream_state: Mapping[str, Any],
        pin_memory: bool,
    ) -> StreamLoader:
        """Return the loader of a data-parallel rank's micro-batches. `stream_state`: of the checkpoint, which
        has the position."""
        return StreamLoader(self._tokens, self.layout, rank, step_sizes, pin_memory, stream_state)

    def shares(self) -> list[dict[str, Any]]:
        """Return an empty list: the epochs of a stream are not known."""
        return []

    def describe_size(self) -> str:
        """Return how much there is to train on, for the log."""
        return f"sequences of {self.seq_len} tokens from a stream"

    def describe_conversations(self, seq_len: int) -> list[str]:
        """Return an empty list: a stream has no conversations."""
        return []

    def describe(self, num_sequences: int) -> list[str]:
        """Describe how the stream is read, for the log."""
        layout = [f"{LAYOUT_NAMES[key]} = {value}" for key, value in asdict(self.layout).items()]
        shares = self.layout.num_ranks * max(self.layout.num_workers, 1)
        num_shards = getattr(self._documents, "num_shards", 0)
        how = "read by one loader"
        if shares > 1 and has_own_shards(self._source, self._documents, shares):
            how = f"each of {shares:,} loaders reads its own part of {num_shards:,} shards"
        elif shares > 1:
            why = f"; its {num_shards:,} shards do not divide evenly over them" if num_shards else ""
            if num_shards and self._source.stream.max_documents:
                why = "; max_documents counts over all shards"
            how = f"each of {shares:,} loaders reads all documents and uses every {shares:,}th{why}"
        return [f"{self._source.label}: in its order, {how}; to resume, keep {', '.join(layout)}"]

    def check_resumed(self, train: Mapping[str, Any] | None) -> None:
        """Raise ConfigError if the run cannot continue the stream on its layout. `train`: train.json of the
        checkpoint that it resumes from; None for a new run."""
        if train is None:
            return
        if "stream" not in train:
            raise ConfigError(
                f"the checkpoint of step {train['step']} has no state of the stream, so the run cannot "
                "continue; start a new run from its weights, in another --job.dump_folder, with "
                "--checkpoint.initial_load_path",
                "data.sources",
            )
        before, now = train["stream"], asdict(self.layout)
        changes = [
            f"{name} {before[key]} -> {now[key]}"
            for key, name in LAYOUT_NAMES.items()
            if before[key] != now[key]
        ]
        if changes:
            raise ConfigError(
                f"a stream continues only on the layout on which it began: {', '.join(changes)}. Undo the "
                "change, or make shards of the stream, which train on any layout (titanlite prepare, "
                "[from_stream]), and start a new run from the weights, in another --job.dump_folder, with "
                "--checkpoint.initial_load_path",
                "data.sources",
            )


def _checked_documents(source: Stream) -> Iterable[Any]:
    """Return the documents of a stream. Raises ConfigError if it cannot be read, has no documents, or has no
    text in the first one; if bad documents are skipped, in the first FIRST_DOCUMENTS."""
    errors = list[ConfigError]()
    try:
        documents = source.documents()
        for number, document in enumerate(islice(documents, FIRST_DOCUMENTS)):
            try:
                source.text(document, describe_document(number))
                break
            except ConfigError as e:
                errors.append(e)
                if source.bad_documents == "stop":
                    raise
        else:
            raise errors[0] if errors else ConfigError(f"{source.label}: the stream has no documents")
    except OSError as e:
        raise Unreadable(f"{source.label}: {e}") from None
    if hasattr(documents, "state_dict"):
        try:
            json.dumps(documents.state_dict())
        except (TypeError, ValueError) as e:
            raise ConfigError(f"{source.label}: the stream's state_dict is not JSON: {e}") from None
    return documents
