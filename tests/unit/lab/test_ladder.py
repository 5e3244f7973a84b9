"""`titanlite tune --ladder`: the runs that it writes, and its refusals."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, tiny_arguments
from titanlite import cli
from titanlite.job import Job, load_job
from titanlite.lab import ladder
from titanlite.lab.shapes import count
from titanlite.lab.trial_runs import TrialRecord, TrialRun

MODEL = {"dim": 64, "n_layers": 8, "n_heads": 8, "hidden_dim": 128}
SETTINGS = ["--lr_scheduler.total_steps=0", "--validation.enable=true"]
SETTINGS += [f"--model.overrides.{key}={value}" for key, value in MODEL.items()]
LADDER = ["--ladder", "--sizes=40K,0.1M", "--ratios=0.2,0.1"]
NAMES = [f"size={size},ratio={ratio}" for size in ("40K", "0.1M") for ratio in ("0.1", "0.2")]


def command(folder: Path, corpus: Path, *words: str) -> list[str]:
    return ["tune", *tiny_arguments(folder, corpus), *SETTINGS, *words]


def written(folder: Path) -> dict[str, Job]:
    """The jobs in the TOML files of a ladder."""
    return {path.name.removesuffix(".toml"): load_job(path) for path in folder.glob("*.toml")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes=1M"], "--sizes: 1M is not below the job's 296,128 parameters"),
        (["--sizes=2K,40K"], "--sizes: no smaller model of this kind has 2K parameters; the nearest has "),
        (["--sizes=40K,41K"], "--sizes: 41K is the same model as the size before"),
        (["--sizes="], "is not a size such as 30M or 1.5B"),
        (["--sizes=40X"], "'40X' of '40X' is not a size such as 30M or 1.5B"),
        (["--ratios=20,0"], "'0' of '20,0' is not a number such as 20 or 0.5, from 0.000001 to 999999"),
        (["--ratios=20,20.0"], "'20,20.0' has a number twice"),
        (["--coordinate-check"], "command line, --ladder: not together with --coordinate-check"),
        (["--validation.enable=false"], "a ladder compares validation losses; set this key to true"),
        (["--lr_scheduler.decay_start=7"], "must end with the run: leave it out"),
        (
            ['--stages=[{until="end"}]'],
            "shorter runs would have other parts of it; --stages=[] leaves it out",
        ),
        (["--checkpoint.initial_load_path=x"], "the smaller models of a ladder start from random weights"),
        (["--optimizer.lr=1e-3:1e-1:3"], "optimizer.lr"),
        (["--ratios=1e-9"], "'1e-9' of '1e-9' is not a number such as 20 or 0.5"),
        (["--ratios=0.001"], "command line, --ratios: with "),
        (["--ratios=0.001"], "tokens/parameter' is less than one step"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.run(command(tmp_path, corpus, *LADDER, *words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("titanlite: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run_ladder").exists()


@pytest.mark.parametrize("option", ["--sizes=40K", "--write-only"])
def test_a_search_has_no_options_of_a_ladder(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert cli.run(command(tmp_path, corpus, "--optimizer.lr=1e-3:1e-1:3", option)) == 2
    assert f"command line, {option.partition('=')[0]}: it needs --ladder" in capsys.readouterr().err


def test_the_written_runs_have_whole_schedules_and_carried_settings(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path, corpus, *LADDER, "--write-only")
    assert cli.run(words) == 0
    output, folder = capsys.readouterr().out, tmp_path / "run_ladder"
    jobs = written(folder)
    assert sorted(jobs) == sorted(NAMES)
    whole = load_job(words[1], words[2 : -len(LADDER) - 1])
    for name, job in jobs.items():
        size, ratio = {"40K": 40_000, "0.1M": 100_000}[name.split(",")[0][5:]], name.rpartition("=")[2]
        parameters = count(job.model, {})
        assert 0.9 < parameters / size < 1.1
        assert f"{parameters:,}" in output
        steps = job.resolved(1).training.steps
        assert steps == int(float(ratio) * parameters) // (8 * 32)
        assert job.lr_scheduler.factor(steps, steps) < 0.1  # the decay has ended
        assert job.folder == folder / name
        multiple = job.model.config.dim / whole.model.config.dim
        assert multiple < 1
        assert job.model.config.logit_scale == pytest.approx(1 / multiple)
        rates = {g.pattern: g.lr_multiplier for g in job.optimizer.param_groups}
        assert set(rates.values()) == {1 / multiple}, rates
        assert job.training.global_batch_size == whole.training.global_batch_size
    assert cli.run(words) == 0  # unchanged
    assert cli.run([*words, "--standard", f"--output={tmp_path / 'standard'}"]) == 0
    for job in written(tmp_path / "standard").values():
        assert job.model.config.logit_scale == 1
        assert not job.optimizer.param_groups
    capsys.readouterr()


@pytest.mark.full
def test_changed_files_and_other_jobs_are_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(tmp_path, corpus, *LADDER, "--write-only")
    assert cli.run(words) == 0
    assert cli.run([*words, "--optimizer.lr=1e-3"]) == 2
    assert "run_ladder holds another ladder, with another job.optimizer.lr; name" in capsys.readouterr().err
    assert cli.run([*words, "--ratios=0.4"]) == 0  # adds runs
    file = tmp_path / "run_ladder" / f"{NAMES[0]}.toml"
    file.write_text(file.read_text().replace("global_batch_size = 8", "global_batch_size = 4"))
    assert cli.run(words) == 2
    assert f"{file} differs from what this command writes; remove it" in capsys.readouterr().err


def test_the_output_in_the_docs_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "device_name", lambda device: "cpu")  # known GPUs have a column more
    words = ["tune", "llama3_125m", "--ladder", "--write-only"]
    assert cli.run(words) == 0
    output = capsys.readouterr()
    quoted = f"```text\n$ titanlite {' '.join(words)}\n{output.out}```\n"
    assert quoted in (ROOT / "docs" / "tuning.md").read_text()
    assert "left out: no smaller model of this kind has 3.22M parameters" in output.err


def test_gpu_hours_are_those_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: without a known GPU there are none, nor where the model does not fit."""
    words = ["llama3_125m", f"--job.dump_folder={tmp_path / 'run'}"]
    ladder_words = ["tune", *words, "--ladder", "--sizes=50M", "--ratios=20", "--write-only"]
    monkeypatch.setattr(ladder, "device_name", lambda device: "cpu")
    assert cli.run(ladder_words) == 0
    assert "GPU hours" not in capsys.readouterr().out
    monkeypatch.setattr(ladder, "device_name", lambda device: "NVIDIA H200")
    assert cli.run(ladder_words) == 0
    hours = re.search(r"^50M +20 .* ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert hours
    file = tmp_path / "run_ladder" / "size=50M,ratio=20.toml"
    assert cli.run(["plan", str(file), "--gpus=1xH200", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert float(hours[1]) == pytest.approx(plan["time"]["gpu_hours"], rel=0.01)
    monkeypatch.setattr(ladder, "device_name", lambda device: "NVIDIA L4")
    large = [f"--output={tmp_path / 'large'}", "--training.local_batch_size=128"]
    assert cli.run([*ladder_words, *large]) == 0
    assert re.search(r"^50M +20 .* does not fit$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.full
def test_the_next_command_leaves_out_runs_that_diverged(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses: dict[str, float | None] = dict(zip(NAMES, (3.0, None, 2.5, 2.25)))

    class Trained:
        def __init__(self, record: TrialRecord, *_: object) -> None:
            self.record = record

        def train(self, runs: list[TrialRun]) -> None:
            self.record.results.update({run.name: {"loss": losses[run.name]} for run in runs})

    monkeypatch.setattr(ladder, "Trainer", Trained)
    monkeypatch.setattr(TrialRecord, "write_report", lambda self, names: self.folder / "report.html")
    words = command(tmp_path, corpus, *LADDER)
    assert cli.run(words) == 0
    output, folder = capsys.readouterr().out, tmp_path / "run_ladder"
    finite = [str(folder / name) for name in NAMES if losses[name] is not None]
    assert output.endswith(f" --fit {shlex.join(finite)}\n")
    assert output.count("diverged") == 1
    assert re.search(r"^0.1M +0.2 .* 2.2500$", output, re.MULTILINE)
    losses[NAMES[1]] = 2.75
    assert cli.run(words) == 0
    assert capsys.readouterr().out.endswith(f" --fit {folder}\n")
    losses.update(dict.fromkeys(NAMES))
    assert cli.run(words) == 2
    assert "no run has a finite loss; try lower learning rates" in capsys.readouterr().err
