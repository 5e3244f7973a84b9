"""Checkpoints whose small files are damaged or forged: the run resumes from the checkpoint before, every
command ends with one line, nothing hangs, and nothing controls the terminal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Toy, names, open_run, save_steps
from tests.support.jobs import make_job
from tests.support.kinds import WRONG_KINDS
from tests.support.logs import listening
from titanlite import cli
from titanlite.checkpoint import commit
from titanlite.checkpoint.digest import digest_file
from titanlite.train import train

DEEP = "[" * 100_000


pytestmark = pytest.mark.usefixtures("no_hang")


def reseal(step: Path, change: Callable[[dict[str, Any]], Any] = lambda manifest: None) -> None:
    """Update the manifest's hashes after a change of the files."""
    manifest = json.loads((step / commit.MANIFEST).read_text())
    del manifest["sha256"]
    for name in manifest["files"]:
        manifest["files"][name] = digest_file(step / name)._asdict()
    change(manifest)
    (step / commit.MANIFEST).write_text(commit.manifest_text(manifest))


def manifest_with(**values: Any) -> Callable[[Path], None]:
    def craft(step: Path) -> None:
        reseal(step, lambda m: [m.pop(k) if v is None else m.update({k: v}) for k, v in values.items()])

    return craft


def manifest_is(content: str) -> Callable[[Path], None]:
    return lambda step: (step / commit.MANIFEST).write_text(content) and None


def train_is(content: str) -> Callable[[Path], None]:
    def craft(step: Path) -> None:
        (step / "train.json").write_text(content)
        reseal(step)

    return craft


def train_with(**values: Any) -> Callable[[Path], None]:
    def craft(step: Path) -> None:
        tree = json.loads((step / "train.json").read_text())
        tree = {k: v for k, v in {**tree, **values}.items() if v is not None}
        train_is(json.dumps(tree))(step)

    return craft


def replaced(name: str, kind: str) -> Callable[[Path], None]:
    def craft(step: Path) -> None:
        (step / name).unlink()
        WRONG_KINDS[kind][0](step / name)

    return craft


def nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


CRAFTED: dict[str, tuple[Callable[[Path], None], str]] = {
    **{
        f"{name} is {kind}": (replaced(name, kind), r"not a file|regular file|cannot be trusted")
        for name in ("manifest.json", "train.json", ".metadata")
        for kind in ("a named pipe", "a directory", "a link to itself", "/dev/zero")
    },
    "manifest nested deep": (manifest_is(DEEP), "its manifest cannot be trusted: it is nested too deep"),
    "manifest a list": (manifest_is("[]"), "its manifest cannot be trusted: it is not a JSON object"),
    "manifest without ranks": (manifest_with(ranks=None), "ranks is missing"),
    "manifest without saved_at": (manifest_with(saved_at=None), "saved_at is missing"),
    "ranks a text": (manifest_with(ranks="x"), "ranks is 'x', not an integer"),
    "files a list": (manifest_with(files=["a"]), "files is .*, not an object"),
    "a file without size": (manifest_with(files={"x": {"sha256": "0"}}), "size is missing"),
    "a file with NUL": (manifest_with(files={"x\0": {"size": 1, "sha256": "0"}}), "null"),
    "a file of a long name": (
        manifest_with(files={"x" * 300: {"size": 1, "sha256": "0"}}),
        "not a regular file",
    ),
    "something nested in the manifest": (manifest_with(more=nested(900)), "nested too deep"),
    "train.json empty": (train_is(""), "its train.json cannot be trusted"),
    "train.json a list": (train_is("[]"), "its train.json cannot be trusted: it is not a JSON object"),
    "train.json nested deep": (train_is(DEEP), "its train.json cannot be trusted: it is nested too deep"),
    "train.json without identity": (train_with(identity=None), "identity is missing"),
    "an identity nested": (train_with(identity=nested(900)), "nested too deep"),
    "sequences a text": (train_with(sequences="x"), "sequences is 'x', not an integer"),
    "sequences below 0": (train_with(sequences=-5), "sequences is -5"),
    "tokens past 2^63": (train_with(tokens=1 << 63), "tokens is 9223372036854775808"),
    "no global_batch_size": (train_with(global_batch_size=None), "global_batch_size is missing"),
    "no skipped": (train_with(skipped=None), "skipped is missing"),
    "skipped an object": (train_with(skipped={"0": 5}), "skipped is .*, not a list"),
    "skipped of one number": (train_with(skipped=[[5]]), r"\[5\] is not a range \[FIRST, LAST\]"),
    "skipped backwards": (train_with(skipped=[[5, 4]]), r"\[5, 4\] is not a range"),
    "skipped a text": (train_with(skipped=["ab"]), "'ab' is not a range"),
    "skipped past 2^62": (train_with(skipped=[[5, 1 << 62]]), "is not a range"),
    "skipped true": (train_with(skipped=[[False, True]]), "is not a range"),
    "no guard": (train_with(guard=None), "guard is missing"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_the_checkpoint_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    craft, reason = CRAFTED[case]
    save_steps(tmp_path, 2)[1].close()
    step = tmp_path / "checkpoint/step-2"
    craft(step)
    capsys.readouterr()
    for verb in (["checkpoint", "list"], ["checkpoint", "verify"], ["checkpoint", "show"], ["export"]):
        target = [str(tmp_path / "hf")] if verb == ["export"] else []
        code = cli.run([*verb, str(step), *target])
        err = capsys.readouterr().err
        assert code in (0, 2, 3), (verb, err)
        assert "Traceback" not in err, (verb, err)
    with listening(caplog):
        run, other = open_run(tmp_path), Toy()
        run.load(other.net, other.optimizer, other.state)
    run.close()
    assert other.state.step == 1
    assert names(tmp_path) == ["quarantined-step-2-0", "step-1"]
    assert re.search(reason, caplog.text), caplog.text


def test_control_an_unchanged_checkpoint_is_used(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)[1].close()
    reseal(tmp_path / "checkpoint/step-2")
    run, other = open_run(tmp_path), Toy()
    run.load(other.net, other.optimizer, other.state)
    run.close()
    assert other.state.step == 2


def test_what_is_recorded_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(tmp_path, 1)[1].close()
    step = tmp_path / "checkpoint/step-1"
    manifest_with(saved_at="\x1b]0;owned\x07", torch="\x1b[2J\r")(step)
    capsys.readouterr()
    for action in ("list", "show"):
        assert cli.run(["checkpoint", action, str(step)]) == 0
        out = capsys.readouterr().out
        assert "\\x1b]0;owned\\x07" in out
        assert not {"\x1b", "\x07", "\r"} & set(out)


@pytest.mark.parametrize("content", ["[[job]]\n", "job = 3\n", "[job\n", "[model]\nname = 3\n"])
def test_a_crafted_job_is_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    job = make_job(tmp_path, corpus, "--training.steps=1")
    train(job)
    step = job.folder / "checkpoint/step-1"
    (step / "job.toml").write_text(content)
    reseal(step)
    capsys.readouterr()
    for verb in (["generate", str(step), "--prompt=a"], ["export", str(step), str(tmp_path / "hf")]):
        assert cli.run(verb) == 2
        assert "Traceback" not in capsys.readouterr().err


# ---- links


def test_no_link_of_the_run_folder_is_followed(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--training.steps=1")
    job.folder.mkdir()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("job.toml", "env.json", "run_identity.json", ".job.toml", "metrics.partial", "samples.txt"):
        (theirs / name).write_text("theirs\n")
        if name != "run_identity.json":  # an identity is read; by way of a link or not
            (job.folder / name).symlink_to(theirs / name)
    assert train(job) == 0
    assert {p.name: p.read_text() for p in theirs.iterdir()} == {p.name: "theirs\n" for p in theirs.iterdir()}
    assert not (job.folder / "job.toml").is_symlink()


def test_a_lock_that_is_a_link_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path, corpus)  # its file
    (tmp_path / "run").mkdir()
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "run/LOCK").symlink_to(tmp_path / "theirs")
    where = [f"--job.dump_folder={tmp_path / 'run'}", f"--data.cache_dir={corpus / 'cache'}"]
    assert cli.run(["train", str(tmp_path / "job.toml"), *where, "--training.steps=1"]) == 2
    assert f"{tmp_path / 'run/LOCK'}: it is a link, not a file; delete it" in capsys.readouterr().err
    assert (tmp_path / "theirs").read_text() == "theirs"


# ---- a recorded job.toml is of the folder that it lies in


@pytest.mark.parametrize("inside", ["", "checkpoint/step-1"])
def test_a_recorded_job_goes_on_where_it_lies(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_job(tmp_path, corpus)
    start = ["train", "job.toml", "--job.dump_folder=run", f"--data.cache_dir={corpus / 'cache'}"]
    assert cli.run([*start, "--training.steps=1"]) == 0
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "run", tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorded = tmp_path / "moved" / inside / "job.toml"
    assert cli.run(["train", os.path.relpath(recorded), "--training.steps=2"]) == 0
    assert sorted(p.name for p in (tmp_path / "moved/checkpoint").iterdir()) == ["step-1", "step-2"]
    assert not list((tmp_path / "elsewhere").iterdir())
    other = f"--job.dump_folder={tmp_path / 'other'}"
    assert (
        cli.run(["train", str(recorded), other, "--training.steps=1"]) == 0
    )  # unless another folder is chosen
    assert (tmp_path / "other/checkpoint/step-1").exists()
