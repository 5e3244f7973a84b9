"""Runs in a bucket: a run there is the run on a disk; what a kill between any two requests leaves is a run
that goes on; a store that ignores conditions is refused; nothing secret is told."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.support.buckets import AZURE, KEYS, Server, bucket_server, ends_by_itself, faulty_proxy
from tests.support.jobs import make_job
from tests.support.tiers import full
from titanlite import bucket_objects, cli, object_store
from titanlite.checkpoint import commit
from titanlite.checkpoint.digest import write_file
from titanlite.checkpoint.lock import FolderLock
from titanlite.config.component import ConfigError
from titanlite.storage import parse_path, storage_of
from titanlite.train import train

RUN = [
    "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2", "--generation.freq=3",
    "--generation.prompts=['a']", "--metrics.sinks=[]",
]  # fmt: skip


@pytest.fixture(scope="module", params=["memory", full("seaweedfs"), full("azurite")])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with bucket_server(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


OVER_HTTP = pytest.mark.parametrize("server", ["moto", full("seaweedfs"), full("azurite")], indirect=True)


@pytest.fixture
def folder(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[PurePath]:
    """A run folder in an empty bucket."""
    server.use(monkeypatch)
    yield server.new_folder()
    object_store.forget_clients()


def content(folder: PurePath, name: str) -> bytes:
    return storage_of(folder).read(folder / name)


def losses(folder: PurePath) -> list[tuple[int, float]]:
    lines = map(json.loads, content(folder, "metrics.jsonl").splitlines())
    return [(line["step"], line["train/loss"]) for line in lines]


def names(folder: PurePath) -> list[str]:
    """What is there, without hidden folders: SeaweedFS lists empty ones for a while."""
    return sorted(path.name for path in storage_of(folder).list(folder, "[!.]*"))


def save(folder: PurePath, step: int, text: bytes = b"weights") -> PurePath:
    """Commit a checkpoint with one file."""
    partial = commit.begin(folder, step)
    files = {"__0_0.distcp": write_file(partial / "__0_0.distcp", text)}
    return commit.commit(partial, step, {"train.json": "{}"}, files, {})


@OVER_HTTP
def test_a_run_in_a_bucket_is_the_run_on_a_disk(tmp_path: Path, corpus: Path, folder: PurePath) -> None:
    local = make_job(tmp_path, corpus, *RUN, "--training.steps=7")
    assert train(local) == 0
    dump_folder, checkpoints = f"--job.dump_folder={folder}", folder / "checkpoint"
    assert train(make_job(tmp_path, corpus, *RUN, dump_folder, "--training.steps=5")) == 0
    assert [step for step, _ in commit.list_committed(checkpoints)] == [4, 5]
    keys = object_store._resolved(checkpoints / "step-5")
    bucket_objects.put(folder, f"{keys}/__0_0.distcp", b"damage")
    assert train(make_job(tmp_path, corpus, *RUN, dump_folder, "--training.steps=7")) == 0
    assert names(checkpoints) == ["quarantined-step-5-0", "step-4", "step-6", "step-7"]
    assert commit.read_manifest(checkpoints / "step-7")["commit"] == "create"
    for name in ("checkpoint/step-7/__0_0.distcp", "checkpoint/step-7/.metadata", "samples.txt"):
        assert content(folder, name) == content(local.folder, name)
    assert losses(folder) == losses(local.folder)
    everything = b"".join(
        bucket_objects.get(folder, item["path"]) for item in bucket_objects.listed(folder, "runs")
    )
    for secret in (KEYS["AWS_SECRET_ACCESS_KEY"], AZURE[0]["AZURE_STORAGE_ACCOUNT_KEY"]):
        assert secret.encode() not in everything


def work(folder: PurePath) -> None:
    """What changes checkpoints: a save, retention, a rewind to step 3, and a damaged checkpoint."""
    commit.retain(folder, keep_latest=2)
    commit.archive_after(folder, 3)
    commit.quarantine(folder / "step-3")
    save(folder, 3, b"again")


@pytest.mark.parametrize("before", [full(True), False], ids=["before", "after"])
def test_a_kill_at_any_request_loses_nothing(
    folder: PurePath, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LEASE", timedelta(0))  # leftovers are old at once
    monkeypatch.setattr(object_store, "ABANDONED", timedelta(0))
    number, done = 0, False
    while not done:
        number += 1
        run = folder / str(number)
        checkpoints = run / "checkpoint"
        for step in (1, 2, 3, 4):
            save(checkpoints, step)
        done = ends_by_itself(partial(work, checkpoints), number, before)
        with FolderLock(run) as lock:  # the next start
            lock.take()
            commit.clean(checkpoints)
            found = dict(commit.list_committed(checkpoints))
            assert found.keys() >= {3} or "quarantined-step-3-0" in names(checkpoints)
            paths = [*found.values(), *commit.list_quarantined(checkpoints)]
            for archive in storage_of(checkpoints).list(checkpoints, "archived-*"):
                paths += [path for _, path in commit.list_committed(archive)]
            keys = [object_store._resolved(path) for path in paths]
            assert len(set(keys)) == len(keys), "each checkpoint has one name"
            for path in paths:
                assert commit.fault(path) is None
            # Nothing is left over: every object belongs to one of these, or to the run folder.
            owners = (*(f"{key}/" for key in keys),)
            for item in bucket_objects.listed(run, f"runs/first/{number}/checkpoint"):
                is_owned = item["path"].startswith(owners)
                assert is_owned or item["path"].endswith(("/COMMIT", "/.clock")), item["path"]
    assert number > 8


@OVER_HTTP
def test_only_the_name_of_a_commit_decides(folder: PurePath) -> None:
    """Two processes commit one step: one of them does, and its files are the checkpoint's."""
    first, second = (commit.begin(folder, 5) for _ in range(2))
    for path, text in ((first, b"first"), (second, b"second")):
        file = storage_of(path).create(path / "__0_0.distcp")
        file.write(text)
        file.close()
    commit.commit(second, 5, {}, {}, {})
    with pytest.raises(FileExistsError):
        commit.commit(first, 5, {}, {}, {})
    assert content(folder, "step-5/__0_0.distcp") == b"second"


@OVER_HTTP
def test_a_lost_answer_to_a_commit_is_no_failure(folder: PurePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client repeats a request whose answer it did not get, and is refused."""
    client = bucket_objects.client_of(folder)

    class Repeats:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def put(self, *args: Any, **kwargs: Any) -> Any:
            client.put(*args, **kwargs)
            return client.put(*args, **kwargs)

    monkeypatch.setattr(bucket_objects, "clients", {key: Repeats() for key in bucket_objects.clients})
    save(folder, 5)
    assert [step for step, _ in commit.list_committed(folder)] == [5]


def test_a_missing_object_keeps_no_other_from_being_deleted(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Google, where it is an error that ends the deletion of a list."""
    client = bucket_objects.client_of(folder)

    class Google:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def delete(self, keys: list[str]) -> None:
            for key in keys:
                client.head(key)
                client.delete(key)

    monkeypatch.setattr(bucket_objects, "clients", {key: Google() for key in bucket_objects.clients})
    bucket_objects.put(folder, "a", b"")
    bucket_objects.delete(folder, "missing", "a", "missing as well")
    bucket_objects.delete(folder, "missing")
    assert bucket_objects.listed(folder, "") == []


@OVER_HTTP
def test_a_store_that_ignores_conditions_is_refused(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = bucket_objects.client_of(folder)

    class Careless:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def put(self, key: str, data: bytes, **options: Any) -> Any:
            return client.put(key, data)

    monkeypatch.setattr(bucket_objects, "clients", {key: Careless() for key in bucket_objects.clients})
    with pytest.raises(ConfigError, match="this store ignores conditional writes"):
        FolderLock(folder).take()


@OVER_HTTP
def test_the_lease_of_a_process_that_ended_is_free(folder: PurePath, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = storage_of(folder).lock(folder / "LOCK")
    assert lock.try_take()
    lock.write_owner("process 1 on a host")
    other = storage_of(folder).lock(folder / "LOCK")
    assert not other.try_take()
    assert other.owner() == "process 1 on a host"
    lock._ends.set()  # it does not renew any more
    lock._renewals.join()
    monkeypatch.setattr(object_store, "_has_ended", lambda pid: pid == os.getpid())
    assert other.try_take(), "its process has ended on this machine"
    monkeypatch.undo()
    other._ends.set()
    other._renewals.join()
    third = storage_of(folder).lock(folder / "LOCK")
    assert not third.try_take()
    monkeypatch.setattr(object_store, "LEASE", timedelta(seconds=-1))
    assert not third.try_take(), "it does not ask for the time before the lease that it saw runs out"
    third = storage_of(folder).lock(folder / "LOCK")
    assert third.try_take(), "its lease has run out, by the store's clock"
    with pytest.raises(OSError) as error:
        other.write_owner("late")
    assert error.value.errno == errno.ESTALE
    third.release()


@OVER_HTTP
def test_a_lock_that_is_deleted_meanwhile_is_created_again(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the last worker of a preparation, while another one starts."""
    before, lock = (storage_of(folder).lock(folder / "LOCK") for _ in range(2))
    assert before.try_take()
    before.release()
    read = lock._read

    def read_and_delete() -> Any:
        found = read()
        monkeypatch.setattr(lock, "_read", read)
        bucket_objects.delete(folder, "runs/first/LOCK")
        return found

    monkeypatch.setattr(lock, "_read", read_and_delete)
    assert lock.try_take()
    bucket_objects.delete(folder, "runs/first/LOCK")
    lock.write_owner("worker 1")
    assert storage_of(folder).lock(folder / "LOCK").owner() == "worker 1"
    lock.release()


@OVER_HTTP
def test_the_stores_clock_is_read_although_its_object_is_deleted_meanwhile(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = bucket_objects.put

    def put_and_delete(path: PurePath, key: str, data: bytes) -> None:
        put(path, key, data)
        bucket_objects.delete(path, key)
        monkeypatch.setattr(bucket_objects, "put", put)

    monkeypatch.setattr(bucket_objects, "put", put_and_delete)
    assert abs((bucket_objects.now(folder / "LOCK") - datetime.now(timezone.utc)).total_seconds()) < 60
    assert bucket_objects.put is put


def test_a_lease_that_another_process_has_taken_is_lost(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RENEWAL_S", 0.01)
    lock = storage_of(folder).lock(folder / "LOCK")
    assert lock.try_take()
    assert not lock.is_lost()
    bucket_objects.put(folder, "runs/first/LOCK", b'{"token": "other"}')
    lock._renewals.join(30)
    assert lock.is_lost()


def test_an_unfinished_checkpoint_of_a_living_process_is_not_swept(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = commit.begin(folder, 5)
    storage_of(partial).put(partial / "a", b"new")
    commit.clean(folder)
    assert storage_of(partial).read(partial / "a") == b"new"
    monkeypatch.setattr(object_store, "LEASE", timedelta(0))
    commit.clean(folder)
    assert not bucket_objects.listed(folder, "runs/first/step-5")


def test_appends_survive_a_kill_and_a_replacement(folder: PurePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "SEGMENT_BYTES", 10)
    storage, path = storage_of(folder), folder / "metrics.jsonl"
    lines = [f"line {i}\n".encode() for i in range(8)]
    for line in lines[:5]:
        storage.append(path, line)
    object_store._tails.clear()  # another process goes on
    for line in lines[5:]:
        storage.append(path, line)
    assert storage.read(path) == b"".join(lines)
    assert storage.size(path) == len(b"".join(lines))
    assert storage.read(path, 3, 4) == b"".join(lines)[3:7]
    assert names(folder) == ["metrics.jsonl"]
    storage.put(path, b"kept\n")
    storage.append(path, b"next\n")
    assert storage.read(path) == b"kept\nnext\n"
    assert len(bucket_objects.listed(folder, "runs/first")) == 1
    storage.delete(path)
    assert not storage.exists(path)


@pytest.mark.full
@OVER_HTTP
def test_large_files_are_sent_in_parts_and_read_by_ranges(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(bucket_objects.SMALL_BYTES + 3 * bucket_objects.PART_BYTES + 12345)
    storage, path = storage_of(folder), folder / "large"
    file, reused = storage.create(path), bytearray(1 << 20)  # torch.save writes from memory that it reuses
    for start in range(0, len(data), 1 << 20):
        part = data[start : start + (1 << 20)]
        reused[: len(part)] = part
        file.write(memoryview(reused)[: len(part)])
    file.close()
    assert storage.read(path) == data
    with storage.open(path) as stream:
        stream.seek(-5, os.SEEK_END)
        assert stream.read() == data[-5:]
        assert stream.seek(100) == 100
        assert stream.read(7) == data[100:107]
    again = storage.create(path)
    with pytest.raises(FileExistsError):
        again.write(data)


def child(path: PurePath, queue: Any) -> None:
    try:
        storage_of(path).read(path)
    except RuntimeError as e:
        queue.put(str(e))


def test_a_forked_child_is_refused_in_place_of_a_hang(folder: PurePath) -> None:
    storage_of(folder).put(folder / "a", b"1")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(folder / "a", queue))
    process.start()
    assert "forked after its parent had used a bucket" in queue.get(timeout=60)
    process.join()


def test_a_store_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Server("s3", "http://127.0.0.1:9").use(monkeypatch)
    monkeypatch.setattr(bucket_objects, "RETRIES", {"max_retries": 0})
    try:
        with pytest.raises(OSError, match="does not answer") as error:  # exit code 1
            FolderLock(parse_path("s3://bucket/run")).take()
    finally:
        object_store.forget_clients()
    assert "\n" not in str(error.value)
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(error.value)


def test_a_wait_for_the_store_is_told_and_can_be_interrupted(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """obstore itself waits in Rust, where Python handles no signals."""
    monkeypatch.setattr(bucket_objects, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr(bucket_objects, "PATIENCE_S", 0.3)
    answered, began = threading.Event(), time.monotonic()

    def interrupt(*args: Any) -> None:  # as SIGINT's handler, which a background job does not have
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        with pytest.raises(KeyboardInterrupt):
            bucket_objects.request(folder, lambda client: answered.wait(30))
    finally:
        signal.signal(signal.SIGALRM, before)
    with bucket_objects.impatient(), pytest.raises(OSError, match=r"no answer for 0 s") as error:
        bucket_objects.request(folder, lambda client: answered.wait(30))
    answered.set()
    assert time.monotonic() - began < 15
    assert error.value.errno == errno.EREMOTEIO
    assert capsys.readouterr().err.count("no answer of the store for 0 s; waiting for it") == 1


def test_an_address_that_is_no_url_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Server("s3", "127.0.0.1:9").use(monkeypatch)
    try:
        with pytest.raises(ConfigError, match="such as AWS_ENDPOINT_URL, has to begin with http"):
            FolderLock(parse_path("s3://bucket/run")).take()
    finally:
        object_store.forget_clients()


def test_missing_credentials_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(bucket_objects, "RETRIES", {"max_retries": 0})
    folder = parse_path("s3://bucket/run")
    try:
        with pytest.raises(
            PermissionError, match="no credentials in the environment, and the machine has no"
        ):
            storage_of(folder).exists(folder)
    finally:
        object_store.forget_clients()


@OVER_HTTP
def test_a_wrong_path_and_a_missing_bucket_are_one_line(
    tmp_path: Path, corpus: Path, folder: PurePath, server: Server, request: pytest.FixtureRequest
) -> None:
    for text in ("s3://bucket", "s3:///run", "s3://bucket/../run"):
        with pytest.raises(ConfigError, match="expected s3://BUCKET/FOLDER"):
            make_job(tmp_path, corpus, f"--job.dump_folder={text}")
    for text in ("s3://bucket//run", "s3://bucket/./run", "s3://no bucket!/run"):
        with pytest.raises(ConfigError, match=r"leave out // and /./|no bucket can be called"):
            make_job(tmp_path, corpus, f"--job.dump_folder={text}")
    with pytest.raises(ConfigError, match="in a bucket, step-N names a checkpoint"):
        storage_of(folder).check_writable(folder / "step-2", "job.dump_folder")
    storage_of(folder).check_writable(folder / "step-2-sft", "job.dump_folder")
    storage_of(folder).put(folder / "step-2-sft" / "a", b"1")
    assert names(folder) == ["step-2-sft"]
    if "seaweedfs" in request.node.name:  # it makes missing buckets
        return
    missing = parse_path(f"{server.scheme}://there-is-no-such-bucket/run")
    with pytest.raises(ConfigError, match=r"cannot be written to.*404 Not Found: (NoSuchBucket|Container)"):
        FolderLock(missing).take()
    with pytest.raises(NotADirectoryError, match="there-is-no-such-bucket"):  # no missing file
        storage_of(missing).exists(missing)


@pytest.mark.full
def test_commands_read_a_run_in_a_bucket(
    tmp_path: Path,
    corpus: Path,
    folder: PurePath,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    assert train(make_job(tmp_path, corpus, *RUN, f"--job.dump_folder={folder}", "--training.steps=4")) == 0
    capsys.readouterr()

    def run(*words: str) -> str:
        assert cli.run([*words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    url = str(folder)
    assert "4  " in run("checkpoint", "list", url)
    assert "step-4: good" in run("checkpoint", "verify", url)
    assert "model: 20 tensors" in run("checkpoint", "show", url)
    run("checkpoint", "digest", f"{url}/checkpoint/step-4")
    assert "step-4" in run("export", url, str(tmp_path / "export"))
    assert run("generate", url, "--prompt=a", "--max-new-tokens=3").startswith("a")
    run("report", url, "-o", str(tmp_path / "report.html"))
    average = ("checkpoint", "average", url, "--last=2", "-o", str(tmp_path / "average"))
    assert "steps 2, 4" in run(*average)
    start = f"--checkpoint.initial_load_path={url}/checkpoint/step-4"
    second = make_job(tmp_path, corpus, *RUN, start, "--training.steps=1", name="second")
    assert train(second) == 0
    # A copy is made once, and only of whole checkpoints.
    copies = list((tmp_path / "user_cache/titanlite/fetched").glob("*/step-4"))
    assert len(copies) == 1
    keys = object_store._resolved(folder / "checkpoint/step-2")
    bucket_objects.put(folder, f"{keys}/__0_0.distcp", b"damage")
    assert cli.run(["export", f"{url}/checkpoint/step-2", str(tmp_path / "other")]) == 3
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_command_without_buckets_refuses_a_url(
    folder: PurePath, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["report", "outputs/a", "-o", f"{folder}/report.html"]) == 2
    error = capsys.readouterr().err
    assert "takes a path on a local disk, not a URL" in error
    assert error.count("\n") == 1


@OVER_HTTP
@pytest.mark.parametrize("seed", [0, *(full(seed) for seed in range(1, 6))])
def test_faults_of_the_network_change_nothing(
    folder: PurePath, server: Server, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in five is refused, torn, slow, carried out twice or without an answer, or not at all."""
    backoff = {"init_backoff": timedelta(seconds=0.01), "max_backoff": timedelta(seconds=0.1), "base": 2}
    monkeypatch.setattr(bucket_objects, "RETRIES", {"max_retries": 20, "backoff": backoff})
    checkpoints, large = folder / "checkpoint", os.urandom(bucket_objects.SMALL_BYTES + 12345)
    with faulty_proxy(server.endpoint, seed) as proxy:
        server.use(monkeypatch, proxy.endpoint)
        with FolderLock(folder) as lock:
            lock.take()
            lock.write_owner()
            for step in (1, 2, 3):
                save(checkpoints, step, large if step == 3 else b"weights")
                storage_of(folder).append(folder / "metrics.jsonl", f"{step}\n".encode())
            commit.retain(checkpoints, keep_latest=2)
            commit.archive_after(checkpoints, 2)
            save(checkpoints, 3, b"again")
            lock.renew()
        assert {step: commit.fault(path) for step, path in commit.list_committed(checkpoints)} == {
            2: None, 3: None,
        }  # fmt: skip
        assert content(checkpoints, "archived-0/step-3/__0_0.distcp") == large
        assert content(checkpoints, "step-3/__0_0.distcp") == b"again"
        assert content(folder, "metrics.jsonl") == b"1\n2\n3\n"
    assert sum(proxy.counts.values()) - proxy.counts[""] > 10, proxy.counts
