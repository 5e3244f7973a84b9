"""Pins preparations to and from a bucket: the bytes are those on a disk, for any number of processes and
workers; a kill at any request leaves work that the same command continues and does not do again; wrong
stores, changed objects and other commands are one line."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.support.buckets import KEYS, faulty_proxy, s3_server, seaweedfs
from tests.support.counted_storage import url
from tests.support.tiers import full, sampled
from titanlite import bucket_objects, cli, object_store
from titanlite.corpus import pipeline, shared_work
from titanlite.corpus.bucket_files import find_inputs
from titanlite.corpus.stages import JobState
from titanlite.data import text_files, tokenize_files
from titanlite.data.remote_shards import RemoteTokens
from titanlite.data.text_sources import Text
from titanlite.storage import parse_path, storage_of
from titanlite.tokenizers.bytes import Bytes

FILTERS = ["--filters.0.name=length", "--filters.0.min_words=3", "--filters.1.name=exact_duplicates"]


@pytest.fixture(scope="module", params=["moto", full("seaweedfs")])
def s3_endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 server."""
    server = s3_server() if request.param == "moto" else seaweedfs(tmp_path_factory.mktemp("seaweedfs"))
    with server as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some 6 splits in 3 shards; the cache folder of this test."""
    monkeypatch.setattr(text_files, "SPLIT_BYTES", 400)
    monkeypatch.setattr(tokenize_files, "SHARD_BYTES", 900)
    monkeypatch.setattr(shared_work, "POLL_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Lines, compressed lines and text, with duplicates and documents too short."""
    rng, folder = random.Random(0), tmp_path / "raw"
    (folder / "more").mkdir(parents=True)
    texts = [" ".join(rng.choices(["one", "two", "three", "four"], k=rng.randint(2, 9))) for _ in range(60)]
    texts += rng.choices(texts, k=6)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines[:40]))
    (folder / "more/b.jsonl.gz").write_bytes(gzip.compress("".join(lines[40:60]).encode(), mtime=0))
    for i, text in enumerate(texts[60:]):
        (folder / f"more/c{i}.txt").write_text(text)
    return folder


@pytest.fixture
def output(bucket: str) -> PurePath:
    return parse_path(f"s3://{bucket}/data/corpus")


def command(output: object, *words: object, processes: int = 1) -> int:
    options = ["--tokenizer.name=bytes", f"--output={output}", f"--num_processes={processes}"]
    return cli.run(["prepare", *map(str, words), *options])


def prepare(output: object, *words: object, processes: int = 1) -> None:
    assert command(output, *words, processes=processes) == 0


def put(folder: PurePath, source: Path) -> None:
    """Copy a local folder into a bucket."""
    for file in filter(Path.is_file, source.rglob("*")):
        storage_of(folder).put(folder / file.relative_to(source).as_posix(), file.read_bytes())


def objects(folder: PurePath) -> dict[str, bytes]:
    """All objects in a folder of a bucket, or all files of a folder on a disk."""
    if isinstance(folder, Path):
        return {file.name: file.read_bytes() for file in folder.iterdir()}
    start = f"{bucket_objects.key_of(folder)}/"
    items = bucket_objects.listed(folder, start)
    return {i["path"].removeprefix(start): bucket_objects.get(folder, i["path"]) for i in items}


@pytest.fixture
def reference(raw: Path, tmp_path: Path) -> dict[str, bytes]:
    """What the command makes on a disk."""
    prepare(tmp_path / "local", raw, *FILTERS)
    made = objects(tmp_path / "local")
    assert len(made) >= 2 + 2 * 3
    return made


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each stage runs from now on, in this process."""
    calls = Counter[str]()

    def count(name: str) -> Callable[..., Any]:
        original = getattr(JobState, name)

        def function(*args: Any) -> Any:
            calls[name] += 1
            return original(*args)

        return function

    for name in ("_first_removing", "resolve", "encode", "_assemble"):
        monkeypatch.setattr(JobState, name, count(name))
    return calls


# ---- the same bytes


@pytest.mark.parametrize("processes", [1, full(2)])
def test_the_bytes_are_those_on_a_disk(
    raw: Path, output: PurePath, tmp_path: Path, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source = output.parent / "raw"
    put(source, raw)
    inputs = [source / "*.jsonl", source / "more"]
    prepare(output, *inputs, *FILTERS, processes=processes)
    assert f"{output}: " in capsys.readouterr().out
    prepare(tmp_path / "local", *inputs, *FILTERS)
    made = objects(output)
    assert made == objects(tmp_path / "local")
    prepare(tmp_path / "copy", raw / "*.jsonl", raw / "more", *FILTERS)
    of_copy = objects(tmp_path / "copy")
    assert made.keys() == of_copy.keys()
    assert {n for n in made if made[n] != of_copy[n]} == {"report.json"}, "which has the places of samples"
    assert f"{source}/a.jsonl, byte" in made["report.json"].decode()
    RemoteTokens(str(output), tmp_path).verify()
    assert not list((tmp_path / "cache/titanlite/prepare").iterdir())


@pytest.mark.full
def test_shards_are_sent_in_parts(
    raw: Path, output: PurePath, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_objects, "SMALL_BYTES", 100)
    prepare(output, raw, *FILTERS)
    assert objects(output) == reference


@pytest.mark.full
def test_parquet_is_read_by_ranges(output: PurePath, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "raw").mkdir()
    table = pyarrow.table({"text": [f"document number {i}" for i in range(100)], "other": [0] * 100})
    parquet.write_table(table, tmp_path / "raw/a.parquet", row_group_size=10)
    put(output.parent / "raw", tmp_path / "raw")
    prepare(output, output.parent / "raw/a.parquet")
    prepare(tmp_path / "local", tmp_path / "raw/a.parquet")
    assert objects(output) == objects(tmp_path / "local")


# ---- workers


@pytest.mark.parametrize("order", sampled([(0, 1), (1, 0), (2, 0, 1)], []), ids=str)
def test_workers_share_a_corpus(
    raw: Path,
    output: PurePath,
    reference: dict[str, bytes],
    tmp_path: Path,
    order: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On machines that have nothing in common but the bucket."""
    calls = counted(monkeypatch)
    prepare(tmp_path / "alone", raw, *FILTERS)
    alone = dict(calls)
    calls.clear()
    for i in order:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine{i}"))
        assert not shared_work.is_made(output)
        prepare(output, raw, *FILTERS, f"--worker={i}/{len(order)}")
    assert objects(output) == reference
    assert calls == alone, "no work is done twice"


@pytest.mark.full
def test_workers_at_the_same_time(
    raw: Path, output: PurePath, reference: dict[str, bytes], tmp_path: Path
) -> None:
    workers = [start(raw, output, tmp_path, i, 3) for i in range(3)]
    for worker in workers:
        assert worker.wait(300) == 0, (worker.stderr and worker.stderr.read(), "failed")
    assert objects(output) == reference


@pytest.mark.full
def test_two_workers_that_complete_at_once_take_nothing_away(
    raw: Path, output: PurePath, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker completes the dataset and deletes the work, while this one is about to complete it."""
    describe, missing = pipeline._describe, list[str]()

    def other_is_first(*args: Any) -> None:
        monkeypatch.setattr(pipeline, "_describe", describe)
        prepare(output, raw, *FILTERS, "--worker=1/2")
        assert shared_work.is_made(output)
        describe(*args)
        client = bucket_objects.client_of(output)

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(client, name)

            def delete(self, keys: Sequence[str]) -> None:
                client.delete(keys)
                missing.extend(reference.keys() - objects(output).keys())

        monkeypatch.setattr(bucket_objects, "clients", {key: Watched() for key in bucket_objects.clients})

    prepare(output, raw, *FILTERS, "--worker=1/2")
    monkeypatch.setattr(pipeline, "_describe", other_is_first)
    prepare(output, raw, *FILTERS, "--worker=0/2")
    assert objects(output) == reference
    assert not missing


# ---- killed and continued


class Killed(BaseException):
    """A process that ends without another request."""


class KilledAt:
    """obstore's client, which ends the process before or after its n-th request."""

    def __init__(self, client: Any, number: int, before: bool):
        self.client, self.number, self.before, self.count = client, number, before, 0
        self.counts = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.client, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.counts[name] += 1
            if self.count > self.number or (self.count == self.number and self.before):
                raise Killed
            result = call(*args, **kwargs)
            if self.count == self.number:
                raise Killed
            return result

        return counted


def killed(
    output: PurePath, number: int, before: bool, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]
) -> tuple[bool, KilledAt]:
    """Call `work`, which is killed at a request. Returns whether it was, and the client."""
    client = KilledAt(bucket_objects.client_of(output), number, before)
    with monkeypatch.context() as patch:
        patch.setattr(bucket_objects, "clients", dict.fromkeys(bucket_objects.clients, client))
        try:
            work()
        except Killed:
            return True, client
    return False, client


def finish(output: PurePath, *words: object) -> None:
    """Repeat a command that was killed: if it was killed after its last step, the dataset exists."""
    is_made = shared_work.is_made(output)
    assert command(output, *words) == (2 if is_made else 0)


REQUESTS = range(1, 81)


@pytest.mark.parametrize("before", [full(True), False], ids=["before", "after"])
@pytest.mark.parametrize("numbers", [(23, 60), full(REQUESTS)], ids=["some", "all"])
def test_a_kill_at_any_request_loses_nothing(
    raw: Path,
    output: PurePath,
    reference: dict[str, bytes],
    numbers: Sequence[int],
    before: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_store, "LEASE", timedelta(seconds=-1))  # a killed process has let go
    calls = counted(monkeypatch)
    for number in numbers:
        target = output.parent / str(number) / output.name
        bucket_objects.checked.clear()
        was_killed, client = killed(
            target, number, before, monkeypatch, partial(prepare, target, raw, *FILTERS)
        )
        assert was_killed, client.counts
        calls.clear()
        done = list(objects(target))
        finish(target, raw, *FILTERS)
        assert calls["_assemble"] <= sum(name.endswith(".bin") and name not in done for name in reference)
        if any(name.startswith(".prepare/offsets") for name in done):
            assert calls["resolve"] == calls["_first_removing"] == 0
        assert objects(target) == reference, number


@pytest.mark.full
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_requests_of_a_small_preparation(
    raw: Path, output: PurePath, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before has them all."""
    _, client = killed(output, 1 << 30, before, monkeypatch, lambda: prepare(output, raw, *FILTERS))
    assert client.count == REQUESTS.stop - 1, client.counts


@pytest.mark.full
@pytest.mark.parametrize("number", [25, 45, 60, 70])
def test_another_machine_continues(
    raw: Path,
    output: PurePath,
    reference: dict[str, bytes],
    tmp_path: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has nothing but the bucket."""
    monkeypatch.setattr(object_store, "LEASE", timedelta(seconds=-1))
    was_killed, _ = killed(output, number, False, monkeypatch, lambda: prepare(output, raw, *FILTERS))
    assert was_killed
    records = [name for name in objects(output) if name.startswith(".prepare/shard-")]
    calls = counted(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    finish(output, raw, *FILTERS)
    assert calls["_assemble"] + len(records) == sum(name.endswith(".bin") for name in reference)
    assert objects(output) == reference


@pytest.mark.parametrize("number", sampled(range(4, 44, 4), [32]))
def test_a_killed_worker_is_repeated(
    raw: Path,
    output: PurePath,
    reference: dict[str, bytes],
    tmp_path: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_store, "LEASE", timedelta(seconds=-1))

    def work(i: int) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine{i}"))
        prepare(output, raw, *FILTERS, f"--worker={i}/2")

    was_killed, _ = killed(output, number, number % 8 == 0, monkeypatch, lambda: work(1))
    assert was_killed
    work(0)
    assert not shared_work.is_made(output)
    work(1)
    assert objects(output) == reference


@pytest.mark.full
@pytest.mark.parametrize("name", ["lock-0", "scan-000001", "offsets", "shard-00000"])
def test_a_process_that_is_killed_leaves_its_work_to_the_next(
    raw: Path, output: PurePath, reference: dict[str, bytes], tmp_path: Path, name: str
) -> None:
    """With its worker processes, once an object is there."""
    process = start(raw, output, tmp_path)
    while not storage_of(output).list(output / shared_work.WORK, f"{name}*"):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)
    process.kill()
    process.wait()
    again = start(raw, output, tmp_path)
    code = again.wait(300)
    assert code == 0 or (code == 2 and not storage_of(output).list(output / shared_work.WORK))
    assert objects(output) == reference


# ---- other commands, other input


@pytest.mark.full
def test_another_command_waits_its_turn(
    raw: Path, output: PurePath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused while a worker is running; afterwards it takes the place of the unfinished one."""
    prepare(output, raw, "--worker=0/2")
    with shared_work.joined(output, (0, 2), "the key of a job"):
        for worker, reason in (
            ("1/2", "another worker is preparing it from other files, filters or another tokenizer"),
            ("0/1", "a preparation by 2 workers is running"),
        ):
            assert command(output, raw, "--seed=1", f"--worker={worker}") == 2
            assert reason in capsys.readouterr().err.splitlines()[-1]
    prepare(output, raw, "--seed=1")
    prepare(tmp_path / "local", raw, "--seed=1")
    assert objects(output) == objects(tmp_path / "local")
    for words in (["--seed=1"], ["--seed=2"], ["--seed=2", "--worker=0/2"]):
        assert command(output, raw, *words) == 2
        assert capsys.readouterr().err.endswith(f"{output} exists; choose another, or delete it\n")
    prepare(output, raw, "--seed=1", "--worker=1/2")  # more workers than work are no error, as on a disk


@pytest.mark.full
def test_a_paused_process_whose_place_is_taken_ends(
    raw: Path, output: PurePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds an object of the other job under its key, and the other's lock."""
    prepare(output, raw, "--worker=0/2", "--seed=1")
    (theirs,) = (file for file in objects(output) if file.endswith("0.bin"))
    file = tmp_path / theirs
    file.write_bytes(b"other tokens")
    before = objects(output)
    late = shared_work.SharedWork(output, "an earlier job", "lock-0-of-2")
    for act in (
        lambda: late.send_file(file),
        lambda: late.complete(tmp_path, {"shard-00000-an earlier key.json": {"00000.bin": "another tag"}}),
        lambda: late.complete(tmp_path, {}),  # all shards are more than it had
    ):
        with pytest.raises(shared_work.ConfigError, match="another process has begun to prepare it"):
            act()
        assert objects(output) == before
    prepare(output, raw, "--worker=1/2", "--seed=1")
    before = objects(output)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(shared_work.ConfigError, match="another process has begun to prepare it"):
        late.complete(tmp_path, {})
    assert objects(output) == before, "the dataset that the other job has completed"


@pytest.mark.full
def test_a_shard_that_was_changed_is_made_again(
    raw: Path, output: PurePath, reference: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(output, raw, *FILTERS, "--worker=0/2")
    name = min(name for name in objects(output) if name.endswith(".bin"))
    storage_of(output).put(output / name, b"other")
    assert command(output, raw, *FILTERS, "--worker=1/2") == 2
    assert f"{name} was deleted or changed; start the same command again" in capsys.readouterr().err
    assert not shared_work.is_made(output)
    prepare(output, raw, *FILTERS, "--worker=1/2")
    prepare(output, raw, *FILTERS, "--worker=0/2")
    assert objects(output) == reference


@pytest.mark.full
def test_an_object_that_changes_is_one_line(
    raw: Path, output: PurePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file = output.parent / "raw", output.parent / "raw/a.jsonl"
    put(source, raw)
    encode = JobState.encode

    def changed(content: bytes) -> Callable[[JobState, int], Any]:
        def changes_first(self: JobState, index: int) -> Any:
            storage_of(file).put(file, content)
            return encode(self, index)

        return changes_first

    good = (raw / "a.jsonl").read_bytes()
    for content in (good[::-1], good.replace(b"one", b"six")):  # not JSON, or other words
        storage_of(file).put(file, good)
        with monkeypatch.context() as patch:
            patch.setattr(JobState, "encode", changed(content))
            assert command(output, source) == 2
        error = capsys.readouterr().err
        assert f"{file}: changed while it was being prepared; run it again" in error.splitlines()[-1]
    assert not shared_work.is_made(output)
    prepare(output, source)


def test_inputs_are_found_as_on_a_disk(
    raw: Path, output: PurePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("more/picture.png", "more/.hidden/d.txt", ".e.jsonl", "more/f.md", "more/deep/g.txt",
                 "more/h[0].txt", "more/h0.txt", "i*/j.txt", "ii/j.txt"):  # fmt: skip
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / name).write_text("text")
    put(output.parent / "raw", raw)
    monkeypatch.chdir(tmp_path)
    for pattern in ("raw", "raw/*", "raw/*.jsonl", "raw/more", "raw/**", "raw/**/*.txt", "raw/m*/c?.txt",
                    "raw/more/f.md", "r*/a.jsonl", "raw/*/deep", "raw/more/h[0].txt", "raw/i*",
                    "raw/more/h[01].txt"):  # fmt: skip
        local = [str(file) for file in find_inputs([pattern], "input")]
        found = [str(file) for file in find_inputs([f"{output.parent}/{pattern}"], "input")]
        assert found == [f"{output.parent}/{name}" for name in local], pattern
        found = [str(file) for file in find_inputs([f"{url(tmp_path)}/{pattern}"], "input")]
        assert found == [f"{url(tmp_path)}/{name}" for name in local], "a storage from outside"
    for pattern, message in (("nothing", "no such file"), ("raw/*.csv", "no such file"),
                             ("raw/more/*.png/x", "no such file")):  # fmt: skip
        with pytest.raises(shared_work.ConfigError, match=message):
            find_inputs([f"{output.parent}/raw", f"{output.parent}/{pattern}"], "input")
    with pytest.raises(shared_work.ConfigError, match="texts are read from a local disk here"):
        Text(path=[f"{output.parent}/raw"]).check(Bytes().build())


# ---- what a store refuses


class Silent:
    """obstore's client of a store that does not answer any more, from the n-th request on."""

    def __init__(self, client: Any, number: int):
        self.client, self.left = client, number

    def __getattr__(self, name: str) -> Any:
        from obstore.exceptions import GenericError

        self.left -= 1
        if self.left <= 0:
            raise GenericError("HTTP error: error sending request for url (http://127.0.0.1:1/bucket)")
        return getattr(self.client, name)


def test_what_no_work_can_cure_is_one_line_before_any_work(
    raw: Path, output: PurePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    def refused(target: object, reason: str, *words: object) -> None:
        assert command(target, *words or [raw]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in error

    monkeypatch.setattr(JobState, "__init__", lambda *args: 1 / 0)
    storage_of(output).put(output.parent / "mine/notes.txt", b"a")
    refused(output.parent / "mine", "exists; choose another, or delete it")
    refused(output.parent / "step-5", "step-N names a checkpoint")
    refused(output, "raw/nothing.jsonl'", f"{output.parent}/raw/nothing.jsonl")
    if "seaweedfs" not in request.node.name:  # it makes missing buckets
        refused("s3://there-is-no-such-bucket/data", "cannot be written to: ")
        refused(output, "cannot be read: ", "s3://there-is-no-such-bucket/data")
    assert objects(output) == {}
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(raw / "a.jsonl"))
        refused(output, "titanlite: " + str(raw / "a.jsonl/titanlite/prepare") + " cannot be written: ")
        refused(output, "choose another cache folder by XDG_CACHE_HOME")
    client = bucket_objects.client_of(output)
    for number, place in ((1, output), (3, output.parent / "raw")):
        with monkeypatch.context() as patch:
            patch.setattr(bucket_objects, "clients", {("s3", output.parts[0]): Silent(client, number)})
            assert command(output, output.parent / "raw") == 1
        assert f"titanlite: {place}: 127.0.0.1:1 does not answer: " in capsys.readouterr().err

    class Careless:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def put(self, key: str, data: bytes, **options: Any) -> Any:
            return client.put(key, data)

    bucket_objects.checked.clear()
    monkeypatch.setattr(bucket_objects, "clients", {key: Careless() for key in bucket_objects.clients})
    refused(output, "ignores conditional writes")
    assert objects(output) == {}


@pytest.mark.full
def test_refused_credentials_are_one_line(
    raw: Path, output: PurePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if "moto" in request.node.name:
        pytest.skip("moto accepts all")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    assert command(output, raw) == 2
    error = capsys.readouterr().err
    assert f"{output} cannot be written to: " in error
    assert error.count("\n") == 1
    assert "another-secret" not in error


@pytest.mark.full
def test_a_full_bucket_ends_the_command_which_then_continues(
    raw: Path,
    output: PurePath,
    reference: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from obstore.exceptions import GenericError

    client = bucket_objects.client_of(output)

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def put(self, key: str, data: bytes, **options: Any) -> Any:
            if key.endswith("1.idx"):
                raise GenericError("Server returned: status code: 507 Insufficient Storage, QuotaExceeded")
            return client.put(key, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(bucket_objects, "clients", {key: Full() for key in bucket_objects.clients})
        assert command(output, raw, *FILTERS) == 2
    assert f"{output}/00001.idx: 507 Insufficient Storage" in capsys.readouterr().err.splitlines()[-1]
    assert not shared_work.is_made(output)
    calls = counted(monkeypatch)
    prepare(output, raw, *FILTERS)
    num_shards = sum(name.endswith(".bin") for name in reference)
    assert calls["_assemble"] <= num_shards - 2
    assert objects(output) == reference


@pytest.mark.full
def test_a_store_that_does_not_answer_is_exit_code_1(
    raw: Path, output: PurePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From some request on, of the output or of the input; and the same command then continues."""
    monkeypatch.setattr(object_store, "LEASE", timedelta(seconds=-1))  # its lock could not be released
    table = pytest.importorskip("pyarrow").table({"text": ["a short document"]})
    pytest.importorskip("pyarrow.parquet").write_table(table, raw / "d.parquet")
    put(output.parent / "raw", raw)
    client = bucket_objects.client_of(output)
    for number in range(1, 400, 9):
        target = output.parent / str(number) / output.name
        with monkeypatch.context() as patch:
            patch.setattr(bucket_objects, "clients", {("s3", output.parts[0]): Silent(client, number)})
            code = command(target, output.parent / "raw", *FILTERS)
        if code == 0:
            break
        error = capsys.readouterr().err.splitlines()[-1]
        assert code == 1, (number, error)
        assert "127.0.0.1:1 does not answer: " in error
        assert error.endswith("; start the same command again when the store answers")
        finish(target, output.parent / "raw", *FILTERS)
    assert code == 0
    assert number > 100


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_faults_of_the_network_change_nothing(
    raw: Path, output: PurePath, s3_endpoint: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in five is refused, torn, slow, carried out without an answer, or not carried out."""
    backoff = {"init_backoff": timedelta(seconds=0.01), "max_backoff": timedelta(seconds=0.1), "base": 2}
    monkeypatch.setattr(bucket_objects, "RETRIES", {"max_retries": 20, "backoff": backoff})
    source = output.parent / "raw"
    put(source, raw)
    prepare(tmp_path / "local", source, *FILTERS)
    object_store.forget_clients()
    with faulty_proxy(s3_endpoint, seed) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        prepare(output, source, *FILTERS)
        assert objects(output) == objects(tmp_path / "local")
    assert sum(proxy.counts.values()) - proxy.counts[""] > 10, proxy.counts


def start(raw: Path, output: PurePath, tmp_path: Path, i: int = 0, n: int = 1) -> subprocess.Popen[str]:
    """A worker in a process of its own, on a machine of its own."""
    code = (
        "import sys; from titanlite import cli; from titanlite.data import text_files, tokenize_files;"
        "text_files.SPLIT_BYTES, tokenize_files.SHARD_BYTES = 400, 900;"
        "sys.exit(cli.run(sys.argv[1:]))"
    )
    words = ["prepare", str(raw), *FILTERS, "--tokenizer.name=bytes", f"--output={output}"]
    words += ["--num_processes=2", f"--worker={i}/{n}"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / f"machine{i}")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], env=environment, stderr=subprocess.PIPE, text=True
    )
