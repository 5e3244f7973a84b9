"""What goes wrong with a bucket under a run: credentials that are refused or expire, a full bucket, a store
that does not answer, requests that arrive twice, old lists, objects that somebody deletes, kills. The run
says so in a line, and nothing is lost. tests/unit/test_object_store.py has the kills of a save."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.support.buckets import (
    FaultyProxy,
    Server,
    bucket_server,
    ends_by_itself,
    faulty_proxy,
    new_bucket,
    rclone,
)
from tests.support.checkpoints import go, shards
from tests.support.jobs import make_job, tiny_arguments
from tests.support.tiers import full
from titanlite import bucket_objects, cli, object_store
from titanlite.checkpoint import commit, resume
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.digest import first_fault, write_file
from titanlite.checkpoint.lock import FolderLock
from titanlite.config.component import ConfigError
from titanlite.storage import parse_path, storage_of
from titanlite.train import train

RUN = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", "--model.overrides.n_layers=1"]
SECRETS = {
    "AWS_ACCESS_KEY_ID": "recognisable-key",
    "AWS_SECRET_ACCESS_KEY": "recognisable-secret",
    "AWS_SESSION_TOKEN": "recognisable-token",
}
QUICK = {
    "max_retries": 1,
    "backoff": {"init_backoff": timedelta(seconds=0.01), "max_backoff": timedelta(seconds=0.1), "base": 2},
}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[PurePath]:
    """A run folder in a store of this process. A lease there is over at once."""
    monkeypatch.setattr(object_store, "LEASE", timedelta(0))
    with bucket_server("memory", Path()) as server:
        yield server.new_folder()
    object_store.forget_clients()


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before moto, without faults so far. The environment has the secrets."""
    with faulty_proxy(s3_endpoint) as opened:
        opened.rule = lambda method, path: ""
        Server("s3", s3_endpoint).use(monkeypatch, opened.endpoint)
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(bucket_objects, "RETRIES", QUICK)
        monkeypatch.setattr(bucket_objects, "CLIENT_OPTIONS", {"allow_http": True, "timeout": "0.5s"})
        yield opened
    object_store.forget_clients()


@pytest.fixture
def run_folder(proxy: FaultyProxy, s3_endpoint: str) -> PurePath:
    """A run folder behind the proxy."""
    return parse_path(f"s3://{new_bucket(s3_endpoint)}/run")


def arguments(tmp_path: Path, corpus: Path, folder: PurePath, steps: int) -> list[str]:
    return [
        "train",
        *tiny_arguments(tmp_path, corpus),
        *RUN,
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
    ]


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a command has said, without its log and its progress."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("titanlite: ") and "% of" not in line]


def losses(folder: PurePath) -> list[tuple[int, float]]:
    lines = map(json.loads, storage_of(folder).read(folder / "metrics.jsonl").splitlines())
    return [(line["step"], line["train/loss"]) for line in lines]


def committed(folder: PurePath) -> list[int]:
    """The steps of the checkpoints, all of which are whole."""
    found = commit.list_committed(folder / "checkpoint")
    for step, path in found:
        assert commit.fault(path, step) is None
        assert first_fault(path, commit.digests(commit.read_manifest(path))) is None
    return [step for step, _ in found]


def secrets_in(texts: Iterable[bytes], folder: PurePath, local: Path) -> set[str]:
    """The secrets that are in some text, in an object of a bucket or in a local file."""
    objects = (bucket_objects.get(folder, item["path"]) for item in bucket_objects.listed(folder, ""))
    files = (file.read_bytes() for file in local.rglob("*") if file.is_file())
    return {
        secret
        for text in itertools.chain(texts, objects, files)
        for secret in SECRETS.values()
        if secret.encode() in text
    }


def save(folder: PurePath, step: int) -> PurePath:
    """Commit a checkpoint with one file."""
    partial = commit.begin(folder, step)
    files = {"__0_0.distcp": write_file(partial / "__0_0.distcp", b"weights")}
    return commit.commit(partial, step, {"train.json": "{}"}, files, {})


# ---- credentials, a full bucket, silence


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("expired", 2, "400 Bad Request: ExpiredToken: The provided token has expired."),
        full("unknown key", 2, "403 Forbidden: InvalidAccessKeyId: It does not exist."),
        full("quota", 2, "403 Forbidden: QuotaExceeded: The bucket is full."),
        full("full", 2, "507 Insufficient Storage"),
        full(
            "silent",
            1,
            "does not answer: no answer in time; start the same command again when the store answers",
        ),
    ],
)
def test_a_start_that_the_store_refuses_is_one_line(
    tmp_path: Path,
    corpus: Path,
    proxy: FaultyProxy,
    run_folder: PurePath,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    code: int,
    reason: str,
) -> None:
    proxy.rule = lambda method, path: fault if fault not in ("quota", "full") or method == "PUT" else ""
    assert cli.run(arguments(tmp_path, corpus, run_folder, 1)) == code
    lines = errors(capsys)
    assert reason in lines[0]
    assert str(run_folder) in lines[0]
    assert len(lines) == 1, lines
    proxy.rule = lambda method, path: ""
    assert bucket_objects.listed(run_folder, "") == []


@pytest.mark.full
def test_after_credentials_have_expired_the_same_command_goes_on_and_none_is_told(
    tmp_path: Path,
    corpus: Path,
    proxy: FaultyProxy,
    run_folder: PurePath,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = make_job(tmp_path, corpus, *RUN, "--training.steps=6", name="whole")
    assert train(whole) == 0
    original = Checkpointer.save

    def expiring(self: Checkpointer, state: Any) -> None:
        if state.step == 3:
            self.check_save()
            proxy.rule = lambda method, path: "expired"
        original(self, state)

    command = arguments(tmp_path, corpus, run_folder, 6)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", expiring)
        assert cli.run(command) == 3
    error = capsys.readouterr().err
    reason = (
        r"step \d could not be saved: .*400 Bad Request: ExpiredToken: The provided token has expired\..*"
    )
    assert re.search(rf"{reason} \(failure 2 of 3 in a row\)\n", error)
    assert re.fullmatch(
        rf"titanlite: {reason}; the run ends after 3 failed saves in a row", error.splitlines()[-1]
    )
    proxy.rule = lambda method, path: ""  # new credentials
    object_store.forget_clients()
    monkeypatch.setattr(object_store, "_has_ended", lambda pid: True)
    assert committed(run_folder) == [1, 2]
    assert cli.run(command) == 0
    error += capsys.readouterr().err
    assert "resumed from" in error
    assert "is gone" not in error, "a bucket has no folder before its first checkpoint"
    assert committed(run_folder) == [1, 2, 3, 4, 5, 6]
    assert losses(run_folder) == losses(whole.folder)
    assert secrets_in([error.encode()], run_folder, tmp_path) == set()
    # The control: planted secrets are found in an object, a file and a text.
    (tmp_path / "planted").write_text(f"key = {SECRETS['AWS_ACCESS_KEY_ID']}")
    storage_of(run_folder).put(run_folder / "planted", SECRETS["AWS_SECRET_ACCESS_KEY"].encode())
    assert secrets_in([SECRETS["AWS_SESSION_TOKEN"].encode()], run_folder, tmp_path) == {*SECRETS.values()}


@pytest.mark.full
@pytest.mark.parametrize("fault", ["quota", "full", "silent", "unknown key"])
def test_a_run_in_a_bucket_that_was_full_for_a_while(
    tmp_path: Path,
    corpus: Path,
    proxy: FaultyProxy,
    run_folder: PurePath,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    whole = make_job(tmp_path, corpus, *RUN, "--training.steps=6", name="whole")
    assert train(whole) == 0
    original = Checkpointer.save

    def filling(self: Checkpointer, state: Any) -> None:
        if state.step in (3, 5):
            self.check_save()
            kind = fault if state.step == 3 else ""
            proxy.rule = lambda method, path: kind if method != "GET" else ""
        original(self, state)

    monkeypatch.setattr(Checkpointer, "save", filling)
    assert cli.run(arguments(tmp_path, corpus, run_folder, 6)) == 0
    assert "(failure 1 of 3 in a row)" in capsys.readouterr().err
    assert committed(run_folder) == [1, 2, 5, 6]
    # Metrics of the time between are left out; after silence, those of the next minutes, too.
    there, expected = losses(run_folder), losses(whole.folder)
    assert there == (expected[:3] if fault == "silent" else [*expected[:3], expected[5]])
    assert shards(run_folder / "checkpoint/step-6") == shards(whole.folder / "checkpoint/step-6")


@pytest.mark.parametrize("fault", ["unknown key", "reset"])
def test_a_signature_in_a_url_is_not_told(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Azure's shared access signatures; and a password in the URL of an endpoint."""
    proxy.rule = lambda method, path: fault
    signature = {
        "ACCOUNT_NAME": "me",
        "SAS_KEY": "sv=2024-11-04&sig=recognisable",
        "ENDPOINT": proxy.endpoint,
    }
    for name, value in signature.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.replace("//", "//me:recognisable@"))
    for url in ("az://container/run", "s3://bucket/run"):
        folder = parse_path(url)
        with pytest.raises(OSError) as error:
            storage_of(folder).exists(folder)
        assert "recognisable" not in str(error.value)
    with pytest.raises((OSError, ConfigError)) as refusal:
        FolderLock(parse_path("az://container/run")).take()
    assert "recognisable" not in str(refusal.value)


class Role(BaseHTTPRequestHandler):
    """Gives credentials that are about to expire, to a pod or by a machine's metadata service."""

    given = itertools.count()

    def do_PUT(self) -> None:
        self.answer(b"token")

    def do_GET(self) -> None:
        ends = datetime.now(timezone.utc) + timedelta(seconds=30)
        credentials = {
            "AccessKeyId": f"key-{next(self.given)}",
            "SecretAccessKey": "secret",
            "Token": "token",
        }
        is_name = self.path.endswith("security-credentials/")
        self.answer(
            b"role" if is_name else json.dumps({**credentials, "Expiration": ends.isoformat()}).encode()
        )

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pod", "machine"])
def test_credentials_of_a_role_are_renewed_during_a_run(
    tmp_path: Path, proxy: FaultyProxy, run_folder: PurePath, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name)
    service = ThreadingHTTPServer(("127.0.0.1", 0), Role)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{service.server_address[1]}"
    if kind == "pod":
        (tmp_path / "token").write_text("a token")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    else:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
    for i in range(3):
        storage_of(run_folder).put(run_folder / "a", str(i).encode())
        time.sleep(0.2)  # obstore asks for new ones at most every 0.1 s
    service.shutdown()
    keys = {text.partition("Credential=")[2].partition("/")[0] for text in proxy.authorizations}
    assert len(keys) > 1, keys


@pytest.mark.full
def test_rclone_which_ignores_conditions_is_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "served/bucket").mkdir(parents=True)
    with rclone(tmp_path / "served") as endpoint:
        Server("s3", endpoint).use(monkeypatch)
        folder = parse_path("s3://bucket/run")
        client = bucket_objects.client_of(folder)
        for data in (b"first", b"second"):  # if this fails one day, rclone has learned conditional writes
            client.put("a", data, mode="create", use_multipart=False)
        assert bytes(client.get("a").bytes()) == b"second"
        assert cli.run(arguments(tmp_path, corpus, folder, 1)) == 2
        object_store.forget_clients()
    lines = errors(capsys)
    assert len(lines) == 1
    assert "this store ignores conditional writes" in lines[0]


# ---- objects that somebody deletes


def test_a_lock_that_was_deleted_is_made_again(folder: PurePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RENEWAL_S", 0.005)
    lock, other = (storage_of(folder).lock(folder / "LOCK") for _ in range(2))
    assert lock.try_take()
    storage_of(folder).delete(folder / "LOCK")
    deadline = time.monotonic() + 60
    while not storage_of(folder).exists(folder / "LOCK"):
        assert time.monotonic() < deadline
    assert not lock.is_lost()
    lock.release()
    storage_of(folder).delete(folder / "LOCK")
    assert other.try_take()
    other.release()


def test_a_run_that_was_suspended_sees_that_its_lock_was_taken(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, other = (storage_of(folder).lock(folder / "LOCK") for _ in range(2))
    assert lock.try_take()
    assert other.try_take(), "the lease is over"
    assert lock.is_lost(), "before its next save"
    assert not other.is_lost()
    other.release()


def test_machines_of_one_name_do_not_know_each_others_processes(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LEASE", timedelta(minutes=1))
    monkeypatch.setattr(object_store, "_has_ended", lambda pid: pid == os.getpid())
    for here, there, is_free in (("a", "b", False), ("", "", False), ("a", "a", True)):
        lock, other = (storage_of(folder).lock(folder / "LOCK") for _ in range(2))
        monkeypatch.setattr(object_store, "_machine", lambda: here)  # noqa: B023
        assert lock.try_take()
        monkeypatch.setattr(object_store, "_machine", lambda: there)  # noqa: B023
        assert other.try_take() == is_free
        for one in (lock, other):
            one.release()


def test_a_checkpoint_without_its_commit_does_not_exist(
    folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody deletes COMMIT, or a checkpoint that retention is about to delete."""
    paths = {step: save(folder, step) for step in (1, 2, 3, 4)}
    bucket_objects.delete(folder, f"{bucket_objects.key_of(paths[3])}/COMMIT")
    assert [step for step, _ in commit.list_committed(folder)] == [1, 2, 4]
    is_kept = commit.is_kept

    def deleting(path: PurePath) -> bool:
        storage_of(path).delete(path)
        return is_kept(path)

    with monkeypatch.context() as patch:
        patch.setattr(commit, "is_kept", deleting)
        with pytest.raises(FileNotFoundError) as error:  # which the run logs
            commit.retain(folder, keep_latest=2)
    assert error.value.filename == str(paths[1])
    assert [step for step, _ in commit.list_committed(folder)] == [2, 4]
    monkeypatch.setattr(object_store, "ABANDONED", timedelta(0))
    commit.clean(folder)
    assert not bucket_objects.listed(folder, f"{bucket_objects.key_of(folder)}/step-3")
    assert commit.fault(paths[4]) is None


def test_a_checkpoint_whose_file_was_deleted_is_quarantined(folder: PurePath) -> None:
    assert go(folder, 4) is None
    bucket_objects.delete(folder, f"{object_store._resolved(folder / 'checkpoint/step-4')}/train.json")
    assert go(folder, 6) == 3
    assert committed(folder) == [1, 2, 3, 4, 5, 6]
    faults: list[resume.Fault] = []
    assert resume.newest(folder / "checkpoint", -1, faults) is not None
    assert faults == []
    assert [path.name for path in commit.list_quarantined(folder / "checkpoint")] == ["quarantined-step-4-0"]


# ---- lists that are old, requests that arrive twice


@pytest.mark.full
@pytest.mark.parametrize("keeps", [True, False], ids=["", "the control"])
def test_an_old_list_loses_nothing(
    proxy: FaultyProxy, run_folder: PurePath, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """From between the files of step 3 and its COMMIT on, the lists stay as they are."""
    monkeypatch.setattr(object_store, "LEASE", timedelta(0))
    storage, metrics = storage_of(run_folder), run_folder / "metrics.jsonl"
    save(run_folder, 2)
    storage.append(metrics, b"1\n")
    object_store._tails.clear()
    assert storage.read(metrics) == b"1\n"
    complete = commit.complete

    def and_list(*args: Any) -> None:
        complete(*args)
        proxy.lists.clear()
        with monkeypatch.context() as patch:
            patch.setattr(object_store, "LEASE", timedelta(hours=1))
            commit.clean(run_folder)

    with monkeypatch.context() as patch:
        patch.setattr(commit, "complete", and_list)
        newest = save(run_folder, 3)
    storage.append(metrics, b"2\n")
    object_store._tails.clear()  # a new process
    proxy.lists[next(path for path in proxy.lists if "delimiter" in path)]  # there is an old list
    proxy.rule = lambda method, path: "stale"
    storage.append(metrics, b"3\n")
    if not keeps:
        monkeypatch.setattr(object_store, "ABANDONED", timedelta(0))
    commit.clean(run_folder)
    commit.retain(run_folder, keep_latest=1)
    with pytest.raises((commit.CheckpointError, FileExistsError)):
        save(run_folder, 3)
    proxy.rule = lambda method, path: ""
    assert (commit.fault(newest) is None) == keeps
    assert storage.read(metrics) == b"1\n2\n3\n"


@pytest.mark.full
def test_requests_that_arrive_twice_change_nothing(
    proxy: FaultyProxy, run_folder: PurePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.rule = lambda method, path: "twice"
    large = os.urandom(bucket_objects.SMALL_BYTES + 1)
    monkeypatch.setattr(bucket_objects, "PART_BYTES", 5 << 20)
    checkpoints = run_folder / "checkpoint"
    with FolderLock(run_folder) as lock:
        lock.take()
        lock.write_owner()
        for step in (1, 2, 3):
            save(checkpoints, step)
            storage_of(run_folder).append(run_folder / "metrics.jsonl", f"{step}\n".encode())
        file = storage_of(run_folder).create(run_folder / "large")
        file.write(large)
        file.close()
        commit.retain(checkpoints, keep_latest=2)
        commit.archive_after(checkpoints, 2)
        save(checkpoints, 3)
        lock.renew()
    assert committed(run_folder) == [2, 3]
    assert commit.fault(checkpoints / "archived-0/step-3") is None
    assert storage_of(run_folder).read(run_folder / "metrics.jsonl") == b"1\n2\n3\n"
    assert storage_of(run_folder).read(run_folder / "large") == large
    assert proxy.counts["twice"] > 50


@pytest.mark.parametrize("is_sent", [True, False])
def test_an_upload_that_is_completed_twice_is_no_failure(folder: PurePath, is_sent: bool) -> None:
    """After a lost answer, some stores do not know the upload any more when the request is repeated."""
    file: Any = storage_of(folder).create(folder / "large")
    file.write(bytes(bucket_objects.SMALL_BYTES + 1))
    writer, ends = file._writer, pytest.raises(FileNotFoundError) if not is_sent else nullcontext()

    class Repeats:
        def close(self) -> None:
            if is_sent:
                writer.close()
            raise FileNotFoundError("NoSuchUpload")

    file._writer = Repeats()
    with ends:
        file.close()


# ---- kills of a start


def prepared(folder: PurePath, case: str) -> dict[str, Any]:
    """A run folder with four checkpoints, and the configuration of its next start."""
    go(folder, 4, keep_latest_k=3)
    partial = commit.begin(folder / "checkpoint", 5)
    storage_of(partial).put(partial / "__0_0.distcp", b"half")
    if case == "damaged":
        bucket_objects.put(
            folder, f"{object_store._resolved(folder / 'checkpoint/step-4')}/__0_0.distcp", b""
        )
    return {"keep_latest_k": 3, "load_step": 3 if case == "rewind" else -1}


CASES = [(case, before, 1) for case in ("leftovers", "damaged", "rewind") for before in (True, False)]


@pytest.mark.parametrize(("case", "before", "stride"), [("damaged", False, 9), *(full(*c) for c in CASES)])
def test_a_kill_at_any_request_of_a_start_loses_nothing(
    folder: PurePath, case: str, before: bool, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume with its quarantine or rewind, two saves and retention. `stride`: from kill to kill."""
    monkeypatch.setattr(object_store, "ABANDONED", timedelta(0))
    config = prepared(folder / "whole", case)
    go(folder / "whole", 6, **config)
    steps = committed(folder / "whole")
    for number in itertools.count(1, stride):
        run = folder / str(number)
        config = prepared(run, case)
        done = ends_by_itself(partial(go, run, 6, **config), number, before)
        assert max(step for step, _ in commit.list_committed(run / "checkpoint")) >= 3
        go(run, 6, **config)
        assert committed(run)[-2:] == steps[-2:]
        assert shards(run / "checkpoint/step-6") == shards(folder / "whole/checkpoint/step-6")
        quarantined = commit.list_quarantined(run / "checkpoint")
        assert [path.name for path in quarantined] == ["quarantined-step-4-0"] * (case == "damaged")
        owners = [object_store._resolved(path) for _, path in commit.list_committed(run / "checkpoint")]
        for archive in storage_of(run).list(run / "checkpoint", "archived-*"):
            owners += [object_store._resolved(path) for _, path in commit.list_committed(archive)]
        owners += [object_store._resolved(path) for path in quarantined]
        prefix = bucket_objects.key_of(run / "checkpoint")
        for item in bucket_objects.listed(run, prefix):
            is_owned = item["path"].startswith(tuple(f"{key}/" for key in owners))
            assert is_owned or item["path"].endswith(("/COMMIT", "/.clock")), item["path"]
        if done:
            break
    assert number > 20


@pytest.mark.full
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_kill_at_any_request_of_a_resumed_run_loses_nothing(
    tmp_path: Path, corpus: Path, folder: PurePath, before: bool
) -> None:
    """Of a whole run: records, metrics that are cut, samples."""
    options = [*RUN, "--checkpoint.interval=2", "--generation.freq=1", "--generation.prompts=['a']"]

    def run(steps: int, where: PurePath) -> Callable[[], int]:
        words = [*options, f"--job.dump_folder={where}", f"--training.steps={steps}"]
        return lambda: train(make_job(tmp_path, corpus, *words))

    whole = folder / "whole"
    assert run(4, whole)() == 0
    for number in itertools.count(1):
        killed = folder / str(number)
        # Killed after step 3 at the latest: the metrics of step 3 are cut by the next start.
        assert run(2, killed)() == 0
        done = ends_by_itself(run(4, killed), number, before)
        object_store._tails.clear()
        assert run(4, killed)() == 0
        assert losses(killed) == losses(whole)
        assert committed(killed) == committed(whole)
        assert shards(killed / "checkpoint/step-4") == shards(whole / "checkpoint/step-4")
        if done:
            break
    assert number > 20
