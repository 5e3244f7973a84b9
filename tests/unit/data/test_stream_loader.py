"""Pins the loader of a stream: stopped twice and resumed it gives what an uninterrupted one gives, with any
numbers of ranks and workers; its tokens are those of local files; without its state it begins anew."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.streams import MICRO_BATCH, SEQ_LEN, STEP, state_of, steps, stream_loader, values
from tests.support.tiers import full
from titanlite.config.component import ConfigError, Unreadable
from titanlite.corpus.write_shards import write_shards
from titanlite.data import stream_batches
from titanlite.data.batch import Batch, make_batch
from titanlite.data.packing import ChunkedSequences
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.data.stream_batches import has_own_shards
from titanlite.data.stream_loader import StreamLoader
from titanlite.data.stream_source import DocumentStream, Stream
from titanlite.errors import LoaderError
from titanlite.tokenizers.bytes import Bytes

TEXTS = [f"document {i} " + "x" * (i * 7 % 23) for i in range(100)]  # 19 steps of one rank
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torchs_handler_goes() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


class Texts:
    """An iterable with state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[str]:
        while self.next < len(TEXTS):
            self.next += 1
            yield TEXTS[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Shards:
    """An iterable of several shards, which notes the texts that are read."""

    def __init__(self, texts: list[str], log: list[str], num_shards: int = 6):
        self.texts, self.log, self.num_shards = texts, log, num_shards

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.log.append(text)
            yield text

    def shard(self, num_shards: int, index: int) -> Shards:
        own = range(index, self.num_shards, num_shards)
        return Shards([text for i, text in enumerate(self.texts) if i % self.num_shards in own], self.log)


def without_state() -> list[str]:
    return TEXTS


@dataclass(frozen=True, kw_only=True)
class Made(DocumentStream):
    """A stream of the texts that `make()` returns."""

    name = "made"
    make: Callable[[], Any]

    def build(self) -> Any:
        return self.make()

    def fingerprint(self) -> str:
        return "texts"


def loader(ranks: int, workers: int, rank: int = 0, state: Any = None, **options: Any) -> StreamLoader:
    """The loader of a rank. `options`: `stream`, `limit`, `skip`, and those of `stream_loader`."""
    stream, limit, skip = options.pop("stream", Texts), options.pop("limit", 0), options.pop("skip", False)
    made = Made(make=stream, max_documents=limit)
    source = Stream(stream=made, bad_documents="skip" if skip else "stop")
    return stream_loader(source, ranks, workers, rank, state, **options)


@pytest.mark.parametrize(
    ("ranks", "workers", "stream"),
    [
        (1, 0, Texts),
        (2, 0, Texts),
        full(4, 2, Texts),  # one micro-batch per step: some stops are between the two workers' turns
        full(1, 2, Texts),
        (2, 0, without_state),
        full(2, 2, without_state),
    ],
)
def test_stopped_twice_and_resumed(ranks: int, workers: int, stream: Any) -> None:
    rank = ranks - 1
    whole = values(steps(loader(ranks, workers, rank, stream=stream), 60))  # two epochs and more
    parts, state = list[Batch](), None
    for count in (14, 2, 1, 3, 40):  # stops in the same block of documents, too
        part = loader(ranks, workers, rank, state, stream=stream)
        parts += steps(part, count)
        state = state_of(part)
    assert values(parts) == whole
    assert part.state_dict() == {"sequences": 60 * STEP}


def test_control_without_its_state_a_stream_begins_anew() -> None:
    first = loader(1, 0)
    steps(first, 7)
    state = state_of(first)
    rest = values(steps(loader(1, 0, state=state), 7))
    assert values(steps(loader(1, 0, state={**state, "shares": [{}]}), 7)) != rest


def test_a_step_that_was_interrupted_is_not_in_the_state() -> None:
    """An error between two micro-batches of a step: the state is that of the step before."""
    whole = values(steps(loader(1, 0), 6))
    stopped = loader(1, 0)
    batches = [batch for _ in range(3) for batch in stopped.next_step(CPU)[1]]
    read, taken = StreamLoader.__next__, 0

    def fails(self: StreamLoader) -> Batch:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise LoaderError("no batch")
        return read(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamLoader, "__next__", fails)
        with pytest.raises(LoaderError):
            stopped.next_step(CPU)
    assert state_of(stopped)["returned"] == 3 * STEP // MICRO_BATCH
    batches += steps(loader(1, 0, state=state_of(stopped)), 3)
    assert values(batches) == whole


@pytest.mark.parametrize("masked", [False, True])
def test_the_sequences_are_those_of_shards_of_the_same_documents(tmp_path: Path, masked: bool) -> None:
    """One share reads all documents in their order: token for token what chunk packing makes of files."""
    texts = [*TEXTS[:50], "", *TEXTS[50:]]  # empty documents are left out
    shards = write_shards(TEXTS, tmp_path / "shards", Bytes().build())
    packed = ChunkedSequences(shards, SEQ_LEN, tmp_path, with_document_starts=masked)
    batches = steps(loader(1, 0, stream=lambda: texts, masked=masked), len(packed) // STEP)
    assert len(batches) > 50
    for i, batch in enumerate(batches):
        numbers = range(i * MICRO_BATCH, (i + 1) * MICRO_BATCH)
        sequences = [packed[number] for number in numbers]
        expected = make_batch(numbers, sequences, seq_len=SEQ_LEN, with_positions=masked)
        assert (batch.hash, batch.num_targets) == (expected.hash, expected.num_targets)
        assert batch.targets.tolist() == expected.targets.tolist()
        if masked:
            assert batch.positions.tolist() == expected.positions.tolist()


def test_the_limit_of_documents_holds_after_a_resume() -> None:
    limited = loader(2, 0, 1, limit=10)
    parts = steps(limited, 5)
    parts += steps(loader(2, 0, 1, state_of(limited), limit=10), 5)
    assert values(parts) == values(steps(loader(2, 0, 1, stream=lambda: TEXTS[:10]), 10))


def test_shares_have_different_documents() -> None:
    texts = [
        bytes(t for b in steps(loader(2, 0, r), 8) for t in b.inputs.flatten() if t < 256) for r in (0, 1)
    ]
    assert [text.count(b"document 0 ") for text in texts] == [1, 0]
    assert [text.count(b"document 1 ") for text in texts] == [0, 1]


def test_a_share_reads_only_its_own_shards() -> None:
    log = list[str]()
    own = loader(2, 0, 1, stream=lambda: Shards(TEXTS, log))
    parts = steps(own, 3)
    assert set(log) <= set(TEXTS[1::2])
    parts += steps(loader(2, 0, 1, state_of(own), stream=lambda: Shards(TEXTS, log)), 20)
    assert values(parts) == values(steps(loader(2, 0, 1), 23))  # these shards are every second document
    log.clear()
    steps(loader(8, 0, 1, stream=lambda: Shards(TEXTS, log), sizes=StepSizes.constant(16)), 1)
    assert {TEXTS[0], TEXTS[1]} < set(log)  # too few shards: all documents are read


@pytest.mark.parametrize(
    ("num_shards", "ranks", "own"), [(3, 2, False), (9, 8, False), (4, 2, True), (16, 2, True), (17, 2, True)]
)
def test_shares_with_few_shards_read_all_documents_alike(num_shards: int, ranks: int, own: bool) -> None:
    """Three shards on two shares: the lone shard of the second share is not read twice as often."""
    stream = partial(Shards, TEXTS[:51], [], num_shards)
    assert has_own_shards(Stream(stream=Made(make=stream)), stream(), ranks) == own
    if num_shards != 3:
        return
    tokens = [
        bytes(
            t
            for batch in steps(loader(2, 0, rank, stream=stream), 60)
            for t in batch.inputs.flatten()
            if t < 256
        )
        for rank in (0, 1)
    ]
    counts = [sum(text.count(b"document %d " % i) for text in tokens) for i in range(51)]
    assert min(counts) > 5
    assert max(counts) - min(counts) <= 2


def test_a_block_of_documents_that_another_version_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place in a block of documents means the same if blocks have another size now."""
    whole = values(steps(loader(1, 0), 30))
    parts, state = list[Batch](), None
    for size, count in ((64, 5), (10, 1), (7, 4), (64, 20)):
        monkeypatch.setattr(stream_batches, "TOKENIZED_AT_ONCE", size)
        part = loader(1, 0, state=state)
        parts += steps(part, count)
        state = state_of(part)
    assert values(parts) == whole


def test_bad_documents_are_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bad = [text for i, text in enumerate(TEXTS) for text in ((text, i) if i % 7 == 3 else (text,))]
    whole = values(steps(loader(1, 0, stream=lambda: TEXTS), 30))
    caplog.set_level("WARNING", "titanlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("titanlite"), "propagate", True)
        first = loader(1, 0, stream=lambda: bad, skip=True)
        parts = steps(first, 4)
        parts += steps(loader(1, 0, state=state_of(first), stream=lambda: bad, skip=True), 26)
    assert values(parts) == whole
    one, ten = (message for message in dict.fromkeys(caplog.messages))
    first = (
        "share 0 of 1 has skipped 1 bad document, the last one: document 4 of the stream holds int, not text"
    )
    assert one == f"stream made: {first}"
    assert "has skipped 10 bad documents, the last one: document 76 of the stream holds int" in ten
    with pytest.raises(ConfigError, match="document 4 of the stream holds int"):  # the control
        steps(loader(1, 0, stream=lambda: bad), 4)


def test_steps_of_other_sizes_and_lengths() -> None:
    sizes = StepSizes([StepSize(0, 4), StepSize(8, 8, 2)])
    ramp = loader(1, 0, sizes=sizes, masked=True)
    counts = []
    for _ in range(4):
        size, batches = ramp.next_step(CPU)
        counts.append((size.global_batch_size, [tuple(batch.inputs.shape) for batch in batches]))
    short = (MICRO_BATCH * 2, SEQ_LEN // 2)
    assert counts == [(4, [(2, 16)] * 2)] * 2 + [(8, [short] * 4)] * 2
    rest = loader(1, 0, state=state_of(ramp), sizes=sizes, masked=True)
    assert values(rest.next_step(CPU)[1]) == values(ramp.next_step(CPU)[1])


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), full(1, 2)])
def test_too_few_documents(ranks: int, workers: int) -> None:
    with pytest.raises(ConfigError, match=r"too few documents: one of its 2 shares, .* has no text"):
        steps(loader(ranks, workers, ranks - 1, stream=lambda: ["one"]), 2)


def test_a_stream_that_fails_later_may_be_tried_again() -> None:
    """Exit code 1, so that the launcher restarts the run; the state is that of the last complete step."""

    def texts() -> Iterator[str]:
        yield from TEXTS[:70]  # 64 are tokenised at once
        raise Unreadable("data: connection reset")

    loader_ = loader(1, 0, stream=texts)
    first = values(loader_.next_step(CPU)[1])
    state = state_of(loader_)
    with pytest.raises(LoaderError, match=r"^data: connection reset$") as caught:
        steps(loader_, 50)
    loader_.close()
    assert caught.value.exit_code == 1
    again = loader(1, 0, stream=lambda: TEXTS, state=state)
    whole = loader(1, 0, stream=lambda: TEXTS)
    assert values(steps(whole, 3)) == first + values(steps(again, 2))


class Failing(Texts):
    """A stream that fails at its 70th document, or when it is continued."""

    def __iter__(self) -> Iterator[str]:
        yield from islice(super().__iter__(), 70)
        raise ConnectionError("the server has gone away\nmore")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("next")


@pytest.mark.parametrize("workers", [0, full(2)])
def test_any_error_of_a_stream_is_one_of_the_loader(workers: int) -> None:
    """So that the finished steps are saved, and the launcher may start the run again."""
    first = loader(1, workers)
    steps(first, 1)
    with pytest.raises(LoaderError, match=r"^stream made: ConnectionError: the server has gone away$"):
        steps(loader(1, workers, stream=Failing), 50)
    with pytest.raises(LoaderError, match=r"^stream made: KeyError: 'next'$"):
        steps(loader(1, workers, state=moved_on(first), stream=Failing), 1)


def moved_on(loader: StreamLoader) -> Any:
    """The state of a loader, as if it had read documents before."""
    text = json.dumps(state_of(loader))
    assert '"number": 0' in text
    return json.loads(text.replace('"number": 0', '"number": 1'))


def test_a_document_without_text_is_named() -> None:
    texts: list[Any] = [*TEXTS[:7], 7]
    with pytest.raises(ConfigError, match=r"^document 7 of the stream holds int, not text$"):
        steps(loader(2, 0, 1, stream=lambda: texts), 5)
    with pytest.raises(ConfigError, match=r"^document 3 of the stream \(share 1 of 2\) holds int, not text$"):
        steps(loader(2, 0, 1, stream=lambda: Shards(texts, [])), 5)
