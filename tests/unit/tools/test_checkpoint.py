"""Pins `titanlite checkpoint list|verify|show`: what they print of good and of damaged checkpoints, their
exit codes, and what is said to wrong words."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import Toy, open_run, save_steps
from tests.support.jobs import make_job
from titanlite import cli
from titanlite.checkpoint import commit
from titanlite.config.component import ConfigError
from titanlite.tools import checkpoint
from titanlite.train import train


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the steps 1 to 3."""
    save_steps(tmp_path / "run", 3)[1].close()
    return tmp_path / "run"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def output(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> list[str]:
    """What `titanlite checkpoint ...` prints, as a user starts it."""
    capsys.readouterr()
    exit_code = cli.run(["checkpoint", *map(str, argv)])
    out, err = capsys.readouterr()
    assert exit_code == code, (out, err)
    assert "Traceback" not in err
    return out.splitlines() if code in (0, 3) and not err else err.splitlines()


# ---- list


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoint/step-1.keep").touch()
    for path in (run, run / "checkpoint"):
        where, header, *lines = output(capsys, "list", path)
        assert where == str(run / "checkpoint")
        assert header.split() == ["step", "saved", "at", "size", "ranks"]
        pattern = r" +(\d+)  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 +0\.0 MiB +1(?:  )?(.*)"
        matches = [re.fullmatch(pattern, line) for line in lines]
        assert [(m[1], m[2]) for m in matches if m] == [
            ("1", "kept by step-N.keep"),
            ("2", ""),
            ("3", "newest"),
        ]
    assert "newest" in output(capsys, "list", run / "checkpoint/step-2")[2]


def test_list_tells_what_else_is_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoint"
    flip(folder / "step-3/manifest.json")
    toy = Toy()
    start = open_run(run)
    start.load(toy.state)
    start.close()
    flip(folder / "step-2/manifest.json")
    (folder / ".partial-step-9").mkdir()
    lines = output(capsys, "list", run)[1:]
    assert lines[2].startswith("         2  BAD: its manifest cannot be trusted: ")
    assert lines[3] == ".partial-step-9: being written, or left by a killed run; the next start removes it"
    assert lines[4].startswith("quarantined-step-3-0: damaged and quarantined by a start of the run")


def test_list_tells_of_a_run_that_went_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy()
    back = open_run(run, load_step=1)
    back.load(toy.state)
    back.close()
    assert output(capsys, "list", run)[3:] == [
        "archived-0: steps 2, 3, archived when the run went back or restarted"
    ]


# ---- a folder with several runs


@pytest.fixture
def several(run: Path) -> Path:
    """A folder with the runs `run`, `deep/other` and `only bad`, and what is no run."""
    outputs = run.parent
    save_steps(outputs / "deep/other", 1)[1].close()
    (outputs / "only bad/checkpoint/quarantined-step-1-0").mkdir(parents=True)
    shutil.copytree(run / "checkpoint/step-1", run / "checkpoint/archived-0/step-1")
    (outputs / "run/hf/step-3").mkdir(parents=True)
    (outputs / "run/hf/step-3/config.json").touch()
    (outputs / "latest").symlink_to(run)
    return outputs


@pytest.mark.parametrize(
    "argv",
    [
        ["checkpoint", "list", "DIR"],
        ["checkpoint", "show", "DIR"],
        ["checkpoint", "verify", "DIR/run", "DIR"],
        ["generate", "DIR", "--prompt=a"],
        ["export", "DIR", "DIR/hf"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_a_folder_with_several_runs_is_refused(
    several: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert cli.run([word.replace("DIR", str(several)) for word in argv]) == 2
    out, err = capsys.readouterr()
    runs = [several / name / "checkpoint" for name in ("deep/other", "only bad", "run")]
    listed = ", ".join(map(str, runs))
    assert err == (f"titanlite: {several} holds the checkpoints of 3 runs; give one of them: {listed}\n")
    assert out == ""
    assert not (several / "hf").exists()


def test_initial_weights_from_a_folder_with_several_runs_are_refused(several: Path, corpus: Path) -> None:
    job = make_job(several / "new", corpus, f"--checkpoint.initial_load_path={several}")
    with pytest.raises(ConfigError, match="holds the checkpoints of 3 runs; give one of them: ") as error:
        train(job)
    assert error.value.key == "checkpoint.initial_load_path"
    assert not job.folder.exists()


def test_of_many_runs_the_first_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(12):
        shutil.copytree(run / "checkpoint/step-1", run.parent / f"many/{i:02}/checkpoint/step-1")
    (line,) = output(capsys, "list", run.parent / "many", code=2)
    assert line.endswith(f"{run.parent}/many/09/checkpoint (and 2 more)")
    assert "12 runs" in line


def test_one_run_below_stands_for_itself(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in (("run", [1, 2, 3]), ("deep", [1])):
        header = output(capsys, "list", several / name)
        assert [int(line.split()[0]) for line in header[2:] if line.startswith(" ")] == steps
    assert output(capsys, "show", several / "latest")[0] == str(several / "latest/checkpoint/step-3")
    shutil.move(several / "run/checkpoint", several / "disk")  # on another disk, and linked to
    (several / "run/checkpoint").symlink_to(several / "disk")
    assert output(capsys, "show", several / "run")[0] == str(several / "run/checkpoint/step-3")
    (line,) = output(capsys, "show", several / "only bad", code=3)
    assert "has only quarantined checkpoints: quarantined-step-1-0" in line


# ---- verify


def test_verify_good_ones(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "verify", run)
    assert [line.partition(": ")[0] for line in lines] == [
        str(run / f"checkpoint/step-{step}") for step in (1, 2, 3)
    ]
    assert all(re.fullmatch(r"good, 4 files, 0\.0 MiB", line.partition(": ")[2]) for line in lines)
    shutil.copytree(run / "checkpoint/step-2", tmp_path / "a copy")
    assert output(capsys, "verify", run / "checkpoint", tmp_path / "a copy") == [
        *lines,
        f"{tmp_path / 'a copy'}: good, 4 files, 0.0 MiB",
    ]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "train.json", "job.toml"])
def test_verify_finds_a_flipped_bit_and_goes_on(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    flip(run / "checkpoint/step-2" / name)
    lines = output(capsys, "verify", run, code=3)
    assert [": good," in line for line in lines] == [True, False, True]
    assert lines[1].endswith(f"BAD: {name} is not what was written: its SHA-256 differs")


def without_manifest(step: Path) -> None:
    (step / commit.MANIFEST).unlink()


def empty_manifest(step: Path) -> None:
    (step / commit.MANIFEST).write_bytes(b"")


def flipped_manifest(step: Path) -> None:
    flip(step / commit.MANIFEST)


def short_shard(step: Path) -> None:
    (step / "__0_0.distcp").write_bytes(b"")


def without_train_json(step: Path) -> None:
    (step / "train.json").unlink()


DAMAGES = [without_manifest, empty_manifest, flipped_manifest, short_shard, without_train_json]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("below", ["", "checkpoint/step-3"], ids=["run", "step"])
def test_verify_finds_what_is_missing_or_torn(
    run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], below: str
) -> None:
    damage(run / "checkpoint/step-3")
    line = output(capsys, "verify", run / below, code=3)[-1]
    assert str(run / "checkpoint/step-3") in line
    assert "BAD" in line


def test_verify_tells_a_renamed_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoint/step-3").rename(run / "checkpoint/step-30")
    assert output(capsys, "verify", run, code=3)[-1].endswith("step-30: BAD: its manifest belongs to step 3")


# ---- show


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(output(capsys, "show", run))
    path = run / "checkpoint/step-3"
    assert text.startswith(f"{path}\n  step                   3\n  sequences              24\n")
    values = dict(re.findall(r"^  (\S+) +(.*)$", text, re.MULTILINE))
    assert (values["tokens"], values["global_batch_size"]) == ("240", "8")
    assert (values["ranks"], values["model.dim"]) == ("1", "4")
    assert "None" not in text
    for name, digest in commit.digests(commit.read_manifest(path)).items():
        assert re.search(rf"^  {re.escape(name)} +{digest.size:,}  sha256 {digest.sha256}$", text, re.M), name
    assert "\nmodel: 2 tensors, 20 elements" in text
    assert "\noptimizer: 6 tensors, 42 elements" in text  # two moments of 20 and two steps
    assert "exp_avg" not in text


def test_show_tensors_of_an_older_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "show", run / "checkpoint/step-2", "--tensors")
    assert lines[0] == str(run / "checkpoint/step-2")
    tensors = {
        line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith(("  model.w", "  o"))
    }
    assert tensors["model.weight"] == "float32    (4, 4)"
    assert tensors["optimizer.bias.exp_avg"] == "float32    (4,)"
    assert tensors["optimizer.weight.step"] == "float32    ()"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "train.json", "manifest.json"])
def test_show_of_a_torn_one_is_an_error(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run / "checkpoint/step-3" / name).write_bytes(b"")
    (line,) = output(capsys, "show", run, code=3)
    assert "step-3 is damaged: " in line


@pytest.mark.parametrize("name", [".metadata", "train.json"])
def test_show_of_a_damaged_file_is_an_error_and_no_crash(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = run / "checkpoint/step-3" / name
    file.write_bytes(b"\x00" * file.stat().st_size)
    (line,) = output(capsys, "show", run, code=3)
    assert name in line


# ---- wrong words


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["verfy", "RUN"], "unknown action 'verfy'; did you mean 'verify'?"),
        (["list"], "`titanlite checkpoint list` takes one directory; see --help"),
        (["verify"], "`titanlite checkpoint verify` takes one directory; see --help"),
        (["show", "RUN", "RUN"], "`titanlite checkpoint show` takes one directory; see --help"),
        (["list", "RUN", "RUN"], "`titanlite checkpoint list` takes one directory; see --help"),
        (["list", "RUN", "--tensors"], "unknown option '--tensors' of `titanlite checkpoint list`"),
        (["show", "RUN", "--all"], "unknown option '--all' of `titanlite checkpoint show`"),
        (["list", "RUN/nowhere"], "RUN/nowhere: no such directory"),
        (["verify", "RUN/identity"], "RUN/identity is a file; give its directory: RUN"),
        (
            ["show", "RUN/empty"],
            "RUN/empty holds no checkpoint: give a run folder, or one of its step-N folders",
        ),
        (["verify", "RUN", "RUN/empty"], "RUN/empty holds no checkpoint: give a run folder, or one of its"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words(run: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    (run / "empty").mkdir()
    (run / "identity").touch()
    filled = [word.replace("RUN", str(run)) for word in argv]
    with pytest.raises(ConfigError) as error:
        checkpoint.main(filled)
    assert str(error.value).startswith(message.replace("RUN", str(run)))
    (line,) = output(capsys, *filled, code=2)[-1:]
    assert line == f"titanlite: {error.value}"


@pytest.mark.parametrize("argv", [["-h"], ["show", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    lines = output(capsys, *argv)
    assert lines[0].startswith("usage: titanlite checkpoint list DIR ")
    assert any("--checkpoint.load_step=N" in line for line in lines)


def test_another_format_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoint/step-3/manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["sha256"]
    file.write_text(commit.manifest_text({**manifest, "format": 9}))
    for action in ("list", "verify", "show"):
        assert (
            f"has checkpoint format 9, this version reads {commit.FORMAT}"
            in output(capsys, action, run, code=3)[-1]
        )
