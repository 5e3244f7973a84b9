"""Pins that sources on a storage train as local ones do: the same batches for any number of ranks and
workers, with an empty and with a filled cache; that the cache reads about what Belady's rule needs, and less
than LRU; and that faults of the storage give the right tokens or one line, never wrong tokens."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.support.counted_storage import plant, take_reads, url
from tests.support.datasets import FakeTokenizer, write_dataset
from tests.support.tiers import full
from titanlite import cli
from titanlite.config.component import ConfigError, Unreadable
from titanlite.corpus.write_shards import write_shards
from titanlite.data import downloads, remote_shards, sequence_cache
from titanlite.data.dataset import Data, SequenceDataset
from titanlite.data.downloads import Downloader, Downloads, NodeOrder
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.order import NEVER, Mixture, permute, unpermute
from titanlite.data.remote_shards import FileRange, RemoteTokens
from titanlite.data.sequence_cache import OwnedCache, SequenceCache
from titanlite.data.shards import TokenShards, token_dtype, write_description, write_shard
from titanlite.data.skips import SkippedSequences
from titanlite.data.sources import Source, Tokens
from titanlite.data.step_sizes import StepSize, StepSizes
from titanlite.errors import LoaderError
from titanlite.storage import parse_path, storage_of
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.tiktoken import Tiktoken

SEQ_LEN, BATCH = 32, 24
LARGE = 64 << 20  # bytes of a cache that holds everything


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two datasets of random tokens in several shards; the first has loss masks."""
    folder, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    paths = [folder / "masked", folder / "plain"]
    paths[0].mkdir()
    entries = []
    for number in range(3):
        documents = [rng.integers(0, 1000, size) for size in rng.integers(2, 90, 40)]
        masks = [rng.integers(0, 2, len(document)).astype(bool) for document in documents]
        entries.append(write_shard(paths[0], f"{number:05}", documents, token_dtype(1000), masks))
    write_description(paths[0], FakeTokenizer(), entries, {})
    write_dataset(paths[1], [rng.integers(0, 1000, size) for size in rng.integers(2, 90, 150)], None, 2000)
    return paths


def build(paths: Sequence[str | Path], cache: Path, **keys: Any) -> SequenceDataset:
    sources: list[Source] = [Tokens(path=str(path), weight=i + 1) for i, path in enumerate(paths)]
    data = Data(sources=sources, cache_dir=str(cache), **keys)
    made = data.build(FakeTokenizer(), seq_len=SEQ_LEN, seed=0)
    assert isinstance(made, SequenceDataset)
    return made


def order_of(first: int = 0, rank: int = 0, ranks: int = 1, micro_batch: int = 4) -> MicroBatches:
    skipped = SkippedSequences.merge([[40, 45], [130, 200]])
    sizes = StepSizes([StepSize(0, BATCH), StepSize(100, 2 * BATCH)])
    return MicroBatches(first, sizes, micro_batch, rank, ranks, skipped)


class Node:
    """Ranks of a node without workers, and the work of its downloading process, in this process. `ranks`: the
    data-parallel ranks of the node, of `order.num_ranks`."""

    def __init__(
        self, sequences: SequenceDataset, cache: Path, max_bytes: int, order: MicroBatches, end: int = NEVER
    ):
        self.sequences, ranks = sequences, range(order.num_ranks)
        sequences.use_cache(SequenceCache(cache))
        self.cache = OwnedCache(cache, max_bytes)
        self.downloader = Downloader(sequences, NodeOrder(order, list(ranks), end), self.cache)
        self.loaders = [SequenceLoader(sequences, replace(order, rank=rank), 0, False) for rank in ranks]

    def next(self) -> list[int]:
        """The hashes of the next micro-batch of each rank."""
        position = min(loader.state_dict()["sequences"] for loader in self.loaders)
        while not self.downloader.cycle(position):
            pass
        return [next(loader).hash for loader in self.loaders]

    def close(self) -> None:
        self.downloader.close()
        self.cache.__exit__()


@contextmanager
def node(*arguments: Any, **keys: Any) -> Iterator[Node]:
    made = Node(*arguments, **keys)
    try:
        yield made
    finally:
        made.close()


def local_hashes(
    paths: Sequence[Path], cache: Path, order: MicroBatches, count: int, **keys: Any
) -> list[list[int]]:
    sequences = build(paths, cache, **keys)
    ranks = range(order.num_ranks)
    loaders = [SequenceLoader(sequences, replace(order, rank=rank), 0, False) for rank in ranks]
    return [[next(loader).hash for loader in loaders] for _ in range(count)]


@pytest.mark.parametrize("packing", ["chunk", full("best_fit")])
def test_batches_equal_those_of_local_files_with_any_ranks_and_after_a_resume(
    corpora: list[Path], tmp_path: Path, packing: str
) -> None:
    remote = [url(path) for path in corpora]
    keys = {"packing": packing, "mask_documents": True, "holdout_sequences": 6}
    position, cache = 0, tmp_path / "cache" / "sequences"
    for ranks, max_bytes in [
        (1, 160_000),
        (2, 160_000),
        (3, LARGE),
    ]:  # the second run finds what the first left
        order = order_of(position, ranks=ranks)
        expected = local_hashes(corpora, tmp_path / "local", order, 20, **keys)
        sequences = build(remote, tmp_path / "cache", **keys)
        with node(sequences, cache, max_bytes, order) as made:
            actual = [made.next() for _ in range(20)]
            position = made.loaders[0].state_dict()["sequences"]
        assert actual == expected
        other = local_hashes(corpora, tmp_path / "local", order_of(position + 1, ranks=ranks), 20, **keys)
        assert other != expected  # the control: hashes tell sequences apart


@pytest.mark.full
def test_epochs_in_a_small_cache_read_what_beladys_rule_needs(tmp_path: Path) -> None:
    seq_len, num, epochs = 2047, 480, 3
    rng = np.random.default_rng(1)
    write_dataset(tmp_path / "data", [rng.integers(0, 1000, 600) for _ in range(num * seq_len // 600 + 2)])
    data = Data(sources=[Tokens(path=url(tmp_path / "data"))], cache_dir=str(tmp_path))
    sequences = data.build(FakeTokenizer(), seq_len=seq_len, seed=0)
    assert isinstance(sequences, SequenceDataset)
    num, num_bytes = sequences.epoch_sequences, (seq_len + 1) * 2
    end, capacity = epochs * num // 16 * 16, num // 10
    needed = [sequences.origin(number)[1] for number in range(end)]
    take_reads(tmp_path / "data")
    order = MicroBatches(0, StepSizes.constant(16), 2, 0, 2)
    with node(sequences, tmp_path / "sequences", capacity * num_bytes, order, end) as made:
        for _ in range(end // 4):
            made.next()
            assert size_of(tmp_path / "sequences") <= capacity * num_bytes
    read = sum(size for *_, size in take_reads(tmp_path / "data")) / num_bytes
    optimum, lru = belady_misses(needed, capacity), lru_misses(needed, capacity)
    assert optimum <= read <= 1.05 * optimum
    assert 1.05 * optimum < lru  # the control


def belady_misses(needed: Sequence[int], capacity: int) -> int:
    """How many reads a cache of `capacity` sequences needs that always drops the one needed latest."""
    later: dict[int, list[int]] = {}
    for place, one in enumerate(needed):
        later.setdefault(one, []).append(place)
    held, misses = set[int](), 0
    for one in needed:
        later[one].pop(0)
        misses += one not in held
        held.add(one)
        if len(held) > capacity:
            held.remove(max(held, key=lambda other: later[other][0] if later[other] else NEVER))
    return misses


def lru_misses(needed: Sequence[int], capacity: int) -> int:
    """The same of a cache that drops the one that was used the longest time ago."""
    held, misses = OrderedDict[int, None](), 0
    for one in needed:
        misses += one not in held
        held[one] = None
        held.move_to_end(one)
        if len(held) > capacity:
            held.popitem(last=False)
    return misses


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_warm_run_reads_nothing_and_goes_on_while_the_store_is_away(
    corpora: list[Path], tmp_path: Path
) -> None:
    corpus, order = corpora[1], order_of()
    expected = local_hashes([corpus], tmp_path / "local", order, 80)
    take_reads(corpus)
    sequences = build([url(corpus)], tmp_path)
    end = order.skipped.advance(0, 80 * 4)
    assert take_reads(corpus) == []  # tokens are read when they are needed
    with node(sequences, tmp_path / "sequences", LARGE, order, end) as made:
        assert [made.next() for _ in range(80)] == expected
    reads = take_reads(corpus)
    assert len(set(reads)) == len(reads) <= sequences.epoch_sequences + 8  # a sequence may be of two shards
    plant(corpus, error=[".bin", ".idx", "dataset.json"])
    try:
        remote_shards.ATTEMPTS, attempts = 1, remote_shards.ATTEMPTS
        with node(build([url(corpus)], tmp_path), tmp_path / "sequences", LARGE, order, end) as made:
            assert [made.next() for _ in range(80)] == expected
        with pytest.raises(Unreadable, match=r"counted://.*plain/dataset.json: 503 Slow Down"):
            build([url(corpus)], tmp_path / "new")
    finally:
        remote_shards.ATTEMPTS = attempts
        plant(corpus)
    assert take_reads(corpus) == []


def test_a_cold_start_waits_for_the_first_sequences_only(corpora: list[Path], tmp_path: Path) -> None:
    sequences = build([url(corpora[1])], tmp_path)
    take_reads(corpora[1])
    with node(sequences, tmp_path / "sequences", LARGE, order_of()) as made:
        made.downloader._window_size = 12
        made.next()
    assert len(take_reads(corpora[1])) <= 14


@pytest.mark.full
def test_runs_that_share_a_cache_keep_its_bound_and_read_each_others_sequences(
    corpora: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two owners in one process; locks are per open file."""
    monkeypatch.setattr(downloads, "LOOK_S", 0.0)
    order, cache = order_of(), tmp_path / "sequences"
    expected = local_hashes(corpora, tmp_path / "local", order, 60)
    remote = [url(path) for path in corpora]
    for path in corpora:
        take_reads(path)
    with (
        node(build(remote, tmp_path), cache, 220_000, order) as first,
        node(build(remote, tmp_path), cache, 220_000, order) as second,
    ):
        for one in (first, second):
            one.cache.find_others()
        assert [first.cache.others, second.cache.others] == [[second.cache.owner], [first.cache.owner]]
        for row in expected:
            assert first.next() == row
            assert second.next() == row
            assert size_of(cache) <= 220_000
    shared = sum(len(take_reads(path)) for path in corpora)
    with node(build(remote, tmp_path), tmp_path / "alone", 220_000, order) as alone:
        assert [alone.next() for _ in range(60)] == expected
    assert shared < 1.5 * sum(len(take_reads(path)) for path in corpora)


@contextmanager
def downloading(made: Node) -> Iterator[None]:
    """The node's downloads go on in a thread."""
    stopped = Event()

    def work() -> None:
        while not stopped.is_set():
            made.downloader.cycle(made.loaders[0].state_dict()["sequences"], 0.005)

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.fixture
def corpus(corpora: list[Path], tmp_path: Path) -> Path:
    """A dataset to damage."""
    return Path(shutil.copytree(corpora[1], tmp_path / "corpus"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shards, "MAX_DELAY_S", 0.02)


@pytest.mark.parametrize("fault", [{"error": [".bin"]}, full({"short": True})])
def test_a_fault_that_passes_costs_time_only(corpus: Path, tmp_path: Path, fault: dict[str, Any]) -> None:
    expected = local_hashes([corpus], tmp_path / "local", order_of(), 5)
    sequences = build([url(corpus)], tmp_path)
    plant(corpus, **fault)
    with node(sequences, tmp_path / "sequences", LARGE, order_of()) as made, downloading(made):
        cache = SequenceCache(tmp_path / "sequences")
        wait_for(lambda: bool(cache.db.execute("SELECT 1 FROM errors").fetchone()))
        plant(corpus)
        assert [[next(made.loaders[0]).hash] for _ in range(5)] == expected
    assert not cache.db.execute("SELECT 1 FROM errors WHERE is_final").fetchone()


def test_a_fault_that_stays_ends_the_run_with_a_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_cache, "GIVE_UP_S", 0.3)
    sequences = build([url(corpus)], tmp_path)
    plant(corpus, error=[".bin"])
    with (
        node(sequences, tmp_path / "sequences", LARGE, order_of()) as made,
        downloading(made),
        pytest.raises(
            LoaderError, match=r"^counted://.*corpus/0000\d\.bin: 503 Slow Down; gave up after \d+ s$"
        ),
    ):
        next(made.loaders[0])


def change(file: Path) -> None:
    """Other bytes of the same length."""
    content = file.read_bytes()
    os.replace(write(file.with_suffix(".new"), content[::-1]), file)


def truncate(file: Path) -> None:
    os.replace(write(file.with_suffix(".new"), file.read_bytes()[:-2000]), file)


def write(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change, "the file has changed since"),
        (truncate, "the file has changed since"),
        (Path.unlink, "no such file"),
    ],
)
def test_an_object_that_changes_under_a_run_ends_it(
    corpus: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    sequences = build([url(corpus)], tmp_path)
    for file in corpus.glob("*.bin"):
        damage(file)
    with (
        node(sequences, tmp_path / "sequences", LARGE, order_of()) as made,
        downloading(made),
        pytest.raises(ConfigError, match=rf"corpus/0000\d\.bin: {message}"),
    ):
        next(made.loaders[0])


@pytest.mark.parametrize("name", ["00000.bin", "00001.idx"])
def test_an_object_that_differs_from_dataset_json_is_named(corpus: Path, tmp_path: Path, name: str) -> None:
    """An index when it is opened, tokens of the same length by verify."""
    RemoteTokens(url(corpus), tmp_path).verify()
    change(corpus / name)
    shards = RemoteTokens(url(corpus), tmp_path / "other")
    with pytest.raises(
        ConfigError, match=rf"^counted://.*{name}: its SHA-256 differs from that in dataset.json"
    ):
        shards.verify() if name.endswith("bin") else shards.materialise()


def test_a_wrong_size_and_a_missing_object_are_named_at_the_start(corpus: Path, tmp_path: Path) -> None:
    truncate(corpus / "00000.bin")
    with pytest.raises(ConfigError, match=r"00000.bin has \d+ bytes, dataset.json says \d+"):
        build([url(corpus)], tmp_path / "a")
    (corpus / "00000.bin").unlink()
    with pytest.raises(ConfigError, match=r"00000\.bin: no such file"):
        build([url(corpus)], tmp_path / "b")


def test_a_damaged_entry_of_the_cache_is_downloaded_again(corpus: Path, tmp_path: Path) -> None:
    expected = local_hashes([corpus], tmp_path / "local", order_of(), 10)
    with node(build([url(corpus)], tmp_path), tmp_path / "sequences", LARGE, order_of()) as made:
        made.next()
        damaged = "CAST(substr(data, 1, 9) || x'00' || substr(data, 11) AS BLOB)"
        made.cache.db.execute(f"UPDATE entries SET data = {damaged}")
        made.loaders[0].load_state_dict({"sequences": 0})
        with downloading(made):
            assert [[next(made.loaders[0]).hash] for _ in range(10)] == expected


def test_a_cache_that_is_too_small_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.cache_gib: a micro-batch of the 8 ranks"):
        Node(
            build([url(corpus)], tmp_path), tmp_path / "sequences", 60_000, order_of(ranks=8, micro_batch=30)
        )


@pytest.mark.full  # 5 s
def test_the_downloads_of_a_killed_process_are_whole_and_the_next_run_goes_on(
    corpus: Path, tmp_path: Path
) -> None:
    """With real workers and a real process, which is killed while it downloads."""
    expected = local_hashes([corpus], tmp_path / "local", order_of(), 30)
    sequences = build([url(corpus)], tmp_path)
    sequences.use_cache(SequenceCache(tmp_path / "sequences"))
    end = order_of().skipped.advance(0, 240)
    plant(corpus, slow=0.05)

    def start(order: MicroBatches) -> Downloads:
        return Downloads(sequences, NodeOrder(order, [0], end), LARGE)

    loader = SequenceLoader(sequences, order_of(), 2, False)
    try:
        loader.prefetch(start)
        hashes = [[next(loader).hash]]
        assert isinstance(loader._prefetcher, Downloads)
        os.kill(loader._prefetcher._process.pid or 0, signal.SIGKILL)
        with pytest.raises(LoaderError, match=r"the process that downloads .* was ended by SIGKILL"):
            hashes.extend([batch.hash] for batch in islice(loader, 60))
        taken = len(hashes)
        loader.load_state_dict({"sequences": loader.state_dict()["sequences"]})
        hashes += [[next(loader).hash] for _ in range(30 - taken)]
        assert hashes == expected
    finally:
        loader.close()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("n", [1, 2, 1000, 4096, 4097, 70_001])
def test_unpermute_is_the_inverse_of_permute(n: int) -> None:
    some = np.unique(np.linspace(0, n - 1, 500).astype(np.int64))
    assert unpermute(permute(some, n, 7), n, 7).tolist() == some.tolist()
    assert n < 1000 or permute(permute(some, n, 7), n, 7).tolist() != some.tolist()  # the control


def test_the_next_use_of_a_sequence_is_the_one_in_the_order() -> None:
    """With three sources, of which stages leave one out at the end."""
    changes = [(1500, (1, 1, 6)), (3200, (2, 0, 1))]
    mixture = Mixture([70, 211, 1300], ["a", "b", "c"], (5, 3, 2), 0, changes)
    end = 12_000
    source, sequence = mixture.locate(np.arange(end))
    for position in (0, 777, 1499, 2500, 4000):
        taken = mixture.taken(position)
        for k, size in enumerate(mixture.sizes):
            every = np.arange(size)
            _, uses = mixture.next_use(k, every, np.full(size, taken[k]))
            later = np.arange(position, end)[source[position:] == k]
            first = dict(zip(sequence[later[::-1]].tolist(), later[::-1].tolist()))
            assert [first.get(one, NEVER) for one in every.tolist()] == np.where(
                uses < end, uses, NEVER
            ).tolist()


def test_a_node_knows_which_sequences_it_takes() -> None:
    order = order_of(ranks=4, micro_batch=2)
    nodes = [NodeOrder(order, ranks, 900) for ranks in ([0, 1], [2, 3])]
    taken = [list(one) for one in nodes]
    skipped = {number for number in range(900) if number in order.skipped}
    assert sorted(taken[0] + taken[1]) == sorted({*range(900)} - skipped)
    for one, numbers in zip(nodes, taken):
        before_ramp = [number for number in numbers if number < 100]
        inside = np.arange(100)[one.contains(np.arange(100))]
        assert [number for number in inside.tolist() if number not in skipped] == before_ramp


def test_verify_and_show_read_a_storage_without_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(("a text", "another text"), tmp_path / "data", Bytes().build())
    assert cli.run(["data", "verify", url(tmp_path / "data")]) == 0
    assert re.match(r"counted://.*data: 2 documents, .* tokens, all hashes match\n", capsys.readouterr().out)
    shown = []
    for path in (url(tmp_path / "data"), str(tmp_path / "data")):
        assert cli.run(["data", "show", path, "--seq_len=9"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    change(tmp_path / "data" / "00000.bin")
    assert cli.run(["data", "verify", url(tmp_path / "data")]) == 2
    assert "00000.bin: its SHA-256 differs from that in dataset.json" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def test_a_plan_says_what_a_storage_must_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(("a text of some length",) * 100, tmp_path / "data", Tiktoken().build())
    keys = ["debug", "--gpus=16xH100", "--training.global_batch_size=64", "--json"]
    keys += ["--data.holdout_sequences=0", "--validation.enable=false"]
    source = '[{name="tokens", path="%s"}]'
    assert cli.run(["plan", *keys, f"--data.sources={source % url(tmp_path / 'data')}"]) == 0
    plan = json.loads(capsys.readouterr().out)
    rate = 8 * plan["time"]["tokens_per_second_per_gpu"]  # of a node
    assert plan["storage"]["nodes"] == 2
    assert plan["storage"]["bytes_per_second_per_node"] == pytest.approx(2 * rate)
    assert plan["storage"]["requests_per_second_per_node"] == pytest.approx(rate / plan["run"]["seq_len"])
    num_tokens = TokenShards(tmp_path / "data").num_tokens
    assert plan["storage"]["corpus_gib"] == pytest.approx(2 * num_tokens / 2**30)
    assert cli.run(["plan", *keys, f"--data.sources={source % (tmp_path / 'data')}"]) == 0
    assert json.loads(capsys.readouterr().out)["storage"] is None


@pytest.mark.full
def test_workers_of_a_rank_that_has_used_a_bucket_get_its_sequences(
    corpora: list[Path], tmp_path: Path, bucket: str
) -> None:
    """obstore hangs in a process that was forked after its parent has used it."""
    folder = parse_path(f"s3://{bucket}/data/corpus")
    for file in corpora[0].iterdir():
        if not file.name.startswith("."):
            storage_of(folder).put(folder / file.name, file.read_bytes())
    sequences = build([str(folder)], tmp_path)
    assert all(sequences.remote[0].tags.values())
    sequences.use_cache(SequenceCache(tmp_path / "sequences"))
    loader = SequenceLoader(sequences, order_of(), 2, False)
    loader.prefetch(lambda order: Downloads(sequences, NodeOrder(order, [0], 200), LARGE))
    try:
        actual = [[next(loader).hash] for _ in range(20)]
    finally:
        loader.close()
    assert actual == local_hashes([corpora[0]], tmp_path / "local", order_of(), 20)
    name = next(iter(sequences.remote[0].sizes()))
    storage_of(folder).put(folder / name, (corpora[0] / name).read_bytes()[::-1])
    with pytest.raises(OSError, match="Precondition") as e:
        sequences.remote[0].read_range(FileRange("tokens", 0, 0, 8))
    assert e.value.errno == errno.ESTALE
