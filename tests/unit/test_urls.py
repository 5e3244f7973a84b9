"""What takes a URL: every key and option that names a file or folder takes one or refuses it in one line, and
what is written to a bucket can be read there."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

from tests.support.jobs import make_job, tiny_arguments
from titanlite import cli, commands, fetch, object_store
from titanlite.config import schema
from titanlite.config.component import ConfigError
from titanlite.config.paths import expand_home
from titanlite.job import load_job
from titanlite.metrics.sinks.tensorboard import EventFile
from titanlite.storage import parse_path, storage_of
from titanlite.train import train

# Keep equal to the table in docs/object-stores.md.
KEYS = {
    "job.dump_folder", "checkpoint.initial_load_path", "data.sources.tokens.path",
    "data.validation_sources.tokens.path", "input", "output",
}  # fmt: skip
OPTIONS = {
    ("generate", "path"), ("export", "path"), ("export", "target"), ("import", "source"),
    ("import", "target"), ("compare", "runs"), ("report", "runs"), ("plan", "measured_run"),
}  # fmt: skip


def path_keys(node: Any, name: str = "") -> Iterator[tuple[str, bool]]:
    """The keys that name a file or folder, and whether they take a URL."""
    if node.get("path"):
        yield name, bool(node.get("url"))
    if "items" in node:
        yield from path_keys(node["items"], name)
    for key, below in {**node.get("keys", {}), **node.get("choices", {})}.items():
        yield from path_keys(below, f"{name}.{key}".lstrip("."))


def test_every_key_takes_a_url_or_refuses_it() -> None:
    found = dict(path_keys(schema.table("job"))) | dict(path_keys(schema.table("prepare")))
    assert len(found) > 15
    assert {name for name, takes_url in found.items() if takes_url} == KEYS


@pytest.mark.parametrize(
    "key", ["data.cache_dir", "tokenizer.path", "compile.cache_dir", "checkpoint.folder"]
)
def test_a_key_of_local_paths_refuses_a_url(
    key: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ["--tokenizer.name=tiktoken"] if key == "tokenizer.path" else []
    with pytest.raises(ConfigError, match=rf"{key}: s3://b/x: .*a path on a local disk, not a URL"):
        make_job(tmp_path, corpus, *tokenizer, f"--{key}=s3://b/x")


def test_a_misspelt_url_is_no_local_folder(tmp_path: Path, corpus: Path) -> None:
    for url in "s3:/b/x", "S3://b/x", "s3:b/x":
        with pytest.raises(ConfigError, match=rf"job.dump_folder: {url}: .*s3"):
            make_job(tmp_path, corpus, f"--job.dump_folder={url}")


def test_a_configuration_is_no_url() -> None:
    with pytest.raises(ConfigError, match=r"s3://b/job.toml: this takes a path on a local disk, not a URL"):
        load_job("s3://b/job.toml")


def test_paths_of_different_storages_differ() -> None:
    """Before Python 3.12, paths of pathlib are equal if their parts are."""
    path, *others = [parse_path(text) for text in ("s3://b/x", "gs://b/x", "az://b/x", "b/x")]
    assert len({path, *others}) == 4
    assert all(path != other for other in others)
    same = parse_path("s3://b/x/y").parent
    assert path == same
    assert hash(path) == hash(same)


def test_every_option_takes_a_url_or_refuses_it() -> None:
    found = {}
    for verb in commands.verbs():
        for action in commands.parser(verb)._actions:
            try:
                found[verb, action.dest] = action.type and str(action.type("s3://b/x")) == "s3://b/x"
            except argparse.ArgumentTypeError:
                found[verb, action.dest] = False
            except (ValueError, ConfigError):
                continue
            if isinstance(action.type, type) and issubclass(action.type, PurePath):
                pytest.fail(f"{verb} {action.dest}: use Options.add or object_store.location")
    assert {key for key, takes_url in found.items() if takes_url} == OPTIONS


def test_a_file_url_is_a_local_path(tmp_path: Path, corpus: Path) -> None:
    assert expand_home(f"file://{tmp_path}") == str(tmp_path)
    with pytest.raises(ConfigError, match="expected file:///PATH"):
        expand_home("file://runs/first")
    job = make_job(tmp_path, corpus, f"--job.dump_folder=file://{tmp_path}/run")
    assert job.folder == tmp_path / "run"
    assert object_store.location(f"file://{tmp_path}") == tmp_path


def contents(folder: PurePath) -> dict[str, bytes]:
    storage = storage_of(folder)
    return {path.name: storage.read(path) for path in storage.list(folder)}


def test_targets_in_a_bucket(
    tmp_path: Path,
    corpus: Path,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    more = ["--checkpoint.interval=1", "--training.steps=2", "--metrics.sinks=[]"]
    assert train(make_job(tmp_path, corpus, *more)) == 0
    run, target = str(tmp_path / "run"), f"s3://{bucket}/models/first"
    uploads = list[str]()
    upload = fetch.upload

    def fails(file: Path, path: PurePath) -> None:
        if path.name == "config.json":
            raise OSError(errno.EREMOTEIO, "503", str(path))
        upload(file, path)

    monkeypatch.setattr(fetch, "upload", fails)
    assert cli.run(["export", run, target]) == 3
    error = capsys.readouterr().err
    assert "the same command completes it" in error
    folder = parse_path(target)
    before = contents(folder)
    assert "model.safetensors" in before
    assert "config.json" not in before

    def notes(file: Path, path: PurePath) -> None:
        uploads.append(path.name)
        upload(file, path)

    monkeypatch.setattr(fetch, "upload", notes)
    storage_of(folder).put(folder / "model.safetensors", before["model.safetensors"][:-1] + b"x")
    assert cli.run(["export", run, target]) == 0
    assert uploads == ["model.safetensors", "config.json"], "what is there and right is not sent again"
    assert cli.run(["export", run, str(tmp_path / "local")]) == 0
    assert contents(folder) == contents(tmp_path / "local")
    assert cli.run(["export", run, target]) == 2
    assert "exists; choose another" in capsys.readouterr().err
    assert cli.run(["export", run, f"s3://{bucket}/models/step-2"]) == 2
    assert cli.run(["export", f"s3://{bucket}/checkpoint/step-7", str(tmp_path / "other")]) == 2
    assert "step-7: there is no such checkpoint" in capsys.readouterr().err
    # An average in a bucket is a checkpoint.
    average = f"s3://{bucket}/average"
    assert cli.run(["checkpoint", "average", run, "--last=2", "--allow-decayed", "-o", average]) == 0
    assert cli.run(["checkpoint", "verify", average]) == 0
    assert cli.run(["export", average, f"s3://{bucket}/models/second"]) == 0
    storage_of(folder).put(parse_path(average) / "__0_0.distcp", b"damage")
    capsys.readouterr()
    assert cli.run(["checkpoint", "verify", average]) == 3
    # A folder with other files is left as it is.
    storage_of(folder).put(parse_path(f"s3://{bucket}/mine/notes.txt"), b"mine")
    assert cli.run(["export", run, f"s3://{bucket}/mine"]) == 2
    assert "has other files, such as notes.txt" in capsys.readouterr().err


@pytest.mark.full
def test_tensorboard_and_profiles_in_a_bucket(
    tmp_path: Path, corpus: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from titanlite.metrics.sinks import tensorboard

    monkeypatch.setattr(tensorboard, "MAX_BYTES", 1500)
    folder = parse_path(f"s3://{bucket}/run")
    more = [f"--job.dump_folder={folder}", "--metrics.sinks=[{name='tensorboard'}]"]
    profile = ["--profiling.enable_profiling", "--profiling.profile_freq=3"]
    assert train(make_job(tmp_path, corpus, *more, *profile, "--training.steps=3")) == 0
    assert train(make_job(tmp_path, corpus, *more, "--training.steps=5")) == 0
    (tmp_path / "tb").mkdir()
    files = contents(folder / "tb")
    assert len(files) > 2
    for name, data in files.items():  # aws s3 cp --recursive
        (tmp_path / "tb" / name).write_bytes(data)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert list(contents(folder / "profile")) == ["trace-step-3-rank-0.json.gz"]


def test_tensorboard_does_not_wait_for_a_store_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first report waits for the store; those of the next minutes fail at once, and the last has all."""
    path, puts = parse_path("s3://bucket/run/tb"), list[bytes]()

    def put(storage: Any, path: PurePath, data: bytes) -> None:
        puts.append(data)
        if len(puts) == 4:
            raise OSError(errno.EREMOTEIO, "no answer", str(path))

    monkeypatch.setattr(object_store.ObjectStore, "put", put)
    file = EventFile(path, 0)  # two records
    file.write(1, {"train/loss": 1.0})
    for _ in range(2):
        with pytest.raises(OSError, match=r"no answer|a short time ago"):
            file.write(1, {"train/loss": 1.0})
    assert len(puts) == 4
    object_store.forget_clients()
    file.write(2, {"train/loss": 1.0})
    record_bytes = len(puts[3]) - len(puts[2])
    assert len(puts[-1]) - len(puts[3]) == 2 * record_bytes, "the reports of the time between are there"


def test_tune_beside_a_run_in_a_bucket_is_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*tiny_arguments(tmp_path, corpus), "--job.dump_folder=s3://b/run", "--optimizer.lr=1e-3,2e-3"]
    words.append("--validation.enable")
    assert cli.run(["tune", *words]) == 2
    error = capsys.readouterr().err
    assert "s3://b/run_search: titanlite tune (see --output) needs a folder on a local disk" in error
    assert not Path("s3:").exists()
