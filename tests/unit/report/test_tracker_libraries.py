"""Pins the sinks wandb (offline), mlflow (a file store) and trackio (its local database) with the real
libraries: a run that is killed, resumed and goes back, and `titanlite metrics push`. A test is skipped
without its library; CI installs them."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, make_job, tiny_arguments
from tests.support.trackers import RUN_ID, deliver, real, run_info, values
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.metrics.sinks.jsonl import JsonLines
from titanlite.report.trackers import push
from titanlite.report.trackers.mlflow import MLflow, MLflowClient
from titanlite.report.trackers.trackio import TrackioClient
from titanlite.report.trackers.wandb import WandB, WandBClient
from titanlite.train import train

Rows = list[tuple[int, dict[str, Any]]]
HEADER, BLOCK = 7, 32768  # bytes of a .wandb file
OFFLINE = {"mode": "offline", "project": "test"}


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make


# ---- reading back


def wandb_rows(folder: Path, run_id: str = RUN_ID, wait_s: float = 60) -> Rows:
    """The history in a run's offline files, which a process of wandb's own completes after the run's end. The
    files of a run that was killed are never complete; `wait_s`: how long to wait for that."""
    rows: Rows = []
    files = folder.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb")
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
        deadline = time.monotonic() + wait_s
        while not is_whole(records := all_records(file)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}
                rows.append((row["step"], row))
    return rows


def all_records(file: Path) -> list[Any]:
    """The records of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for data in records_of(file.read_bytes())]


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: after its header, LevelDB's log format."""
    position, record = HEADER, b""
    while position + HEADER <= len(content):
        rest = BLOCK - position % BLOCK
        length, kind = struct.unpack_from("<HB", content, position + 4)  # after a checksum
        if rest < HEADER or kind == 0:  # the block has no more records
            position += rest
            continue
        record += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # a whole record, or the last of its parts
            yield record
            record = b""


def is_whole(records: list[Any]) -> bool:
    """Whether the exit code is there, which is the last record."""
    return any(record.WhichOneof("record_type") == "exit" for record in records)


def mlflow_uri(folder: Path) -> str:
    return (folder / "mlruns").as_uri()


def mlflow_run(folder: Path, run_id: str = RUN_ID) -> tuple[Any, Any]:
    """The library's client, and a run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(mlflow_uri(folder))
    number = client.get_experiment_by_name("titanlite").experiment_id
    (run,) = client.search_runs([number], f"tags.`titanlite.run_id` = '{run_id}'")
    return client, run


def mlflow_history(folder: Path, key: str = "train/loss", run_id: str = RUN_ID) -> list[tuple[int, float]]:
    client, run = mlflow_run(folder, run_id)
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]


def trackio_rows(name: str) -> Rows:
    from trackio.sqlite_storage import SQLiteStorage

    return [(row["step"], row) for row in SQLiteStorage.get_logs("titanlite", name)]


def steps_in(rows: Rows) -> list[int]:
    return [step for step, row in rows if "train/loss" in row]


# ---- kill, resume, going back


def course(folder: Path, client: Any, resumed_step: int, last: int, lr: float = 0.1) -> Any:
    """Take steps as a resumed run does; returns the open delivery."""
    lines = JsonLines(folder / "metrics.jsonl", resumed_step)
    delivery = deliver(folder, client, resumed_step)
    delivery.event(resumed_step, "resumed", {})
    for step in range(resumed_step + 1, last + 1):
        lines.write(step, values(step, lr=lr))
        delivery.write(step, values(step, lr=lr))
    lines.close()
    return delivery


def all_courses(folder: Path, client: Callable[[], Any]) -> None:
    """A run that ends after step 6, resumes at 4, and goes back to 8 with another learning rate."""
    course(folder, client(), 0, 6).close()
    delivery = course(folder, client(), 4, 9)
    delivery.sample(9, 'once </pre> "upon"')
    delivery.close()
    course(folder, client(), 8, 10, lr=0.2).close()


@pytest.mark.full
def test_wandb(tmp_path: Path) -> None:
    real("wandb")
    all_courses(tmp_path, lambda: WandBClient(tmp_path, OFFLINE))
    rows = wandb_rows(tmp_path)
    assert steps_in(rows) == list(range(1, 10))
    assert rows[1][1]["train/loss"] == 9.0
    assert [step for step, row in rows if "samples/0" in row] == [9]
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/samples/0_*.html")
    assert page.read_text() == "<pre>once &lt;/pre&gt; &quot;upon&quot;</pre>"
    assert steps_in(wandb_rows(tmp_path, f"{RUN_ID}-b1")) == list(range(1, 11))


@pytest.mark.full
def test_mlflow(tmp_path: Path) -> None:
    real("mlflow")
    all_courses(tmp_path, lambda: MLflowClient(mlflow_uri(tmp_path), "titanlite"))
    assert mlflow_history(tmp_path) == [(step, 10.0 - step) for step in range(1, 10)]
    assert [step for step, _ in mlflow_history(tmp_path, run_id=f"{RUN_ID}-b1")] == list(range(1, 11))
    _, run = mlflow_run(tmp_path)
    assert run.data.params["training.steps"] == "10"
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "KILLED")
    branch = mlflow_run(tmp_path, f"{RUN_ID}-b1")[1]
    assert (branch.info.run_name, branch.info.status) == (f"{tmp_path.name}@8", "FINISHED")
    assert branch.data.params["branched_from"] == RUN_ID


@pytest.mark.full
def test_mlflow_keeps_samples_and_changed_keys(tmp_path: Path) -> None:
    real("mlflow")
    deliver(tmp_path, MLflowClient(mlflow_uri(tmp_path), "titanlite"), interval=1).sample(3, "once")
    deliver(tmp_path, MLflowClient(mlflow_uri(tmp_path), "titanlite"), interval=2).write(1, {"a": math.nan})
    _, run = mlflow_run(tmp_path)
    assert run.data.params["checkpoint.interval"] == "1"
    assert run.data.tags["changed.checkpoint.interval"] == "2"
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (folder / "samples/step-00000003-0.txt").read_text() == "once"


@pytest.mark.full
def test_mlflow_knows_what_it_has_without_the_journal(tmp_path: Path) -> None:
    real("mlflow")
    course(tmp_path, MLflowClient(mlflow_uri(tmp_path), "titanlite"), 0, 6)
    (tmp_path / "trackers/fake.jsonl").unlink()
    course(tmp_path, MLflowClient(mlflow_uri(tmp_path), "titanlite"), 4, 8)
    assert [step for step, _ in mlflow_history(tmp_path)] == list(range(1, 9))


def rewind(folder: Path, client: Any) -> None:
    """A run that rewinds from step 6 to step 4, and ends after step 8."""
    delivery = course(folder, client, 0, 6)
    delivery.event(4, "rewound", {"reason": "spike", "loss": 9.0})
    for step in range(5, 9):
        delivery.write(step, values(step, "b"))
    delivery.close()


@pytest.mark.full
def test_a_rewind_is_a_branch_with_every_step_once(tmp_path: Path, trackio_folder: Path) -> None:
    for name in ("wandb", "mlflow"):
        real(name)
    folders = {name: tmp_path / name for name in ("wandb", "mlflow", "trackio")}
    for folder in folders.values():
        folder.mkdir()
    rewind(folders["wandb"], WandBClient(folders["wandb"], OFFLINE))
    rewind(folders["mlflow"], MLflowClient(mlflow_uri(tmp_path), "titanlite"))
    rewind(folders["trackio"], TrackioClient("titanlite", ""))
    for run_id, steps in ((RUN_ID, range(1, 7)), (f"{RUN_ID}-b1", range(1, 9))):
        assert [step for step, _ in mlflow_history(tmp_path, run_id=run_id)] == [*steps]
        assert steps_in(wandb_rows(folders["wandb"], run_id)) == [*steps]
    assert mlflow_history(tmp_path, "events/rewound_loss", f"{RUN_ID}-b1") == [(4, 9.0)]
    assert steps_in(trackio_rows("trackio-01234567")) == [*range(1, 7)]
    assert steps_in(trackio_rows("trackio@4-01234567-b1")) == [*range(1, 9)]


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of trackio's database, which its modules have read from the environment."""
    real("trackio")
    from trackio import sqlite_storage, utils

    folder = tmp_path / "trackio"
    for module in (sqlite_storage, utils, sys.modules["trackio"]):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", folder)
    return folder


@pytest.mark.full
def test_trackio(tmp_path: Path, trackio_folder: Path) -> None:
    all_courses(tmp_path, lambda: TrackioClient("titanlite", ""))
    assert trackio_folder.is_dir()
    rows = trackio_rows(f"{tmp_path.name}-01234567")
    assert steps_in(rows) == list(range(1, 10))
    (sample,) = (row["samples/0"] for _, row in rows if "samples/0" in row)
    assert 'once </pre> "upon"' in str(sample)
    assert steps_in(trackio_rows(f"{tmp_path.name}@8-01234567-b1")) == list(range(1, 11))


# ---- a whole run


def sinks(folder: Path) -> str:
    wandb = "{name = 'wandb', mode = 'offline', project = 'test'}"
    mlflow = f"{{name = 'mlflow', tracking_uri = '{mlflow_uri(folder)}'}}"
    return f"--metrics.sinks=[{wandb}, {mlflow}, {{name = 'trackio'}}]"


@pytest.mark.full
def test_a_run_and_a_push_to_all_three(
    tmp_path: Path, corpus: Path, trackio_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "mlflow"):
        real(name)
    assert train(make_job(tmp_path, corpus, "--training.steps=2")) == 0
    job = make_job(tmp_path, corpus, "--training.steps=4", sinks(tmp_path))
    assert train(job) == 0
    run_id = json.loads((job.folder / "run_id.json").read_text())["run_id"]
    assert steps_in(wandb_rows(job.folder, run_id)) == [1, 2, 3, 4]
    assert [step for step, _ in mlflow_history(tmp_path, run_id=run_id)] == [1, 2, 3, 4]
    assert steps_in(trackio_rows(f"run-{run_id[:8]}")) == [1, 2, 3, 4]
    assert train(make_job(tmp_path, corpus, "--training.steps=6")) == 0
    capsys.readouterr()
    for number in (2, 0):
        assert push.main(["push", str(job.folder), sinks(tmp_path)]) == 0
        sent = f"{number} of 6 logged steps were missing; sent"
        printed = [line for line in capsys.readouterr().out.splitlines() if "logged steps" in line]
        assert printed == [
            f"wandb (offline): {sent}",
            f"mlflow ({mlflow_uri(tmp_path)} titanlite): {sent}",
            f"trackio (local titanlite): {sent}",
        ]
    assert steps_in(wandb_rows(job.folder, run_id)) == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in mlflow_history(tmp_path, run_id=run_id)] == [1, 2, 3, 4, 5, 6]
    assert steps_in(trackio_rows(f"run-{run_id[:8]}")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_after_kills_no_tracker_has_a_step_twice(tmp_path: Path, corpus: Path) -> None:
    for name in ("wandb", "mlflow", "trackio"):
        real(name)
    # wandb's variables would connect the run to the wandb process of the tests before this one.
    environment = {key: value for key, value in os.environ.items() if "WANDB" not in key}
    environment |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": str(ROOT)}
    arguments = [*tiny_arguments(tmp_path, corpus), "--training.steps=60", "--lr_scheduler.total_steps=60"]
    arguments += ["--checkpoint.interval=10", "--checkpoint.async_mode=disabled", sinks(tmp_path)]
    command = [sys.executable, "-m", "titanlite.cli", "train", *arguments]
    lines = tmp_path / "run/metrics.jsonl"
    for step in (17, 34, 61):  # killed, killed, left alone
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None and not (lines.exists() and f'{{"step": {step},' in lines.read_text()):
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert process.returncode == 0
    run_id = json.loads((tmp_path / "run/run_id.json").read_text())["run_id"]
    steps = list(range(1, 61))
    assert sorted(step for step, _ in mlflow_history(tmp_path, run_id=run_id)) == steps
    code = (
        "from trackio.sqlite_storage import SQLiteStorage as s; "
        f"print([row['step'] for row in s.get_logs('titanlite', 'run-{run_id[:8]}') if 'train/loss' in row])"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert sorted(json.loads(printed)) == steps
    offline = steps_in(wandb_rows(tmp_path / "run", run_id, wait_s=1))  # a kill loses up to 32 KiB of them
    assert len(offline) == len(set(offline))
    assert set(offline) <= set(steps)
    assert offline[-1] == 60


@pytest.mark.full
def test_wandb_without_a_key_is_offline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    real("wandb")
    client = WandB().client(run_info(tmp_path))
    assert client._options["mode"] == "offline"  # type: ignore[attr-defined]
    (record,) = caplog.records
    assert record.getMessage().startswith("wandb has no API key")


@pytest.mark.full
def test_environment_variables_of_wandb_hold_where_a_key_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = real("wandb")
    monkeypatch.setattr(wandb, "login", lambda **_: True)  # as with a key
    for variable, key, used in (
        ("offline", "", "offline"), ("dryrun", "", "offline"), ("online", "", "online"),
        ("offline", "online", "online"), ("disabled", "offline", "offline"), ("disabled", "", None),
    ):  # fmt: skip
        wandb.teardown()  # which has read the variables
        monkeypatch.setenv("WANDB_MODE", variable)
        monkeypatch.setenv("WANDB_NAME", "mine")
        client: Any = WandB(mode=key).client(run_info(tmp_path))
        assert (client and client._options["mode"], client and client.run_name) == (used, used and "mine")
    WandB().build(run_info(tmp_path)).write(1, values(1))
    assert "wandb is disabled by its environment variables: nothing is sent to it" in caplog.messages
    assert not (tmp_path / "trackers").exists()
    wandb.teardown()


@pytest.mark.full
def test_the_experiment_of_mlflow_may_be_named_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real("mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    made: list[Any] = [MLflow(experiment=name).client(run_info(tmp_path)) for name in ("", "ours")]
    assert [client._experiment for client in made] == ["theirs", "ours"]


# ---- push: what bad input gets


def written_job(folder: Path, corpus: Path) -> Job:
    job = make_job(folder, corpus)
    job.folder.mkdir()
    (job.folder / "job.toml").write_text(toml.dump(job))
    return job


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull"], "unknown action 'pull' .known: push."),
        (["push"], "takes one run folder"),
        (["push", "nowhere"], "nowhere is not a run folder: it has no job.toml"),
        (["push", "RUN"], "names no tracker; add --metrics.sinks="),
        (["push", "RUN", "--metrics.sinks=[{name = 'wandb'}]"], "has no steps to send"),
    ],
)
def test_push_refuses(tmp_path: Path, corpus: Path, arguments: list[str], message: str) -> None:
    job = written_job(tmp_path, corpus)
    with pytest.raises(ConfigError, match=message):
        push.main([str(job.folder) if word == "RUN" else word for word in arguments])


def test_push_refuses_a_run_that_is_training(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = written_job(tmp_path, corpus)
    # As if another process had it.
    monkeypatch.setattr("titanlite.storage._RecordLock.try_take", lambda *_: False)
    with pytest.raises(ConfigError, match="run is in use by another process"):
        push.main(["push", str(job.folder), "--metrics.sinks=[{name = 'wandb'}]"])
