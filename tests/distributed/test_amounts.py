"""Runs whose numbers of steps are given as amounts of training: they equal the run with the integers, to the
bit; the log and the recorded job.toml say what each amount is; a resume converts the amounts anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.datasets import write_dataset
from tests.support.jobs import make_job, metrics_in, write_toml
from tests.support.runs import assert_same, history, train_on_rank
from tests.support.tiers import full
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.tokenizers.bytes import Bytes
from titanlite.train import train

# A step of the base job has 8 sequences of 32 tokens.
IN_STEPS = ["--training.steps=6", "--lr_scheduler.warmup_steps=2", "--checkpoint.interval=4"]
IN_TOKENS = [
    "--training.steps=1536 tokens",
    "--lr_scheduler.warmup_steps=0.75K tokens",
    "--checkpoint.interval=32 sequences",
]


def test_a_run_in_tokens_is_the_run_in_steps(tmp_path: Path, corpus: Path) -> None:
    in_steps, in_tokens, other = (
        make_job(tmp_path / name, corpus, *overrides)
        for name, overrides in {
            "steps": IN_STEPS,
            "tokens": IN_TOKENS,
            "other": [*IN_TOKENS, "--lr_scheduler.warmup_steps=1K tokens"],
        }.items()
    )
    for job in (in_steps, in_tokens, other):
        assert train(job) == 0
    assert_same(in_tokens, in_steps)
    assert (in_tokens.folder / "checkpoint/step-4").exists()
    assert history(other) != history(in_steps)
    assert load_job(in_tokens.folder / "job.toml").training == in_steps.training


def shards(folder: Path, max_epochs: int) -> str:
    """An override: a single source of shards in `folder`."""
    path = folder / "shards"
    if not path.exists():
        write_dataset(path, [[256, *range(97, 97 + i % 50), 257] for i in range(200)], Bytes().build())
    return f"--data.sources=[{{name = 'tokens', path = '{path}', max_epochs = {max_epochs}}}]"


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, list[str]]:
    """The folder of a run of one epoch, and the overrides of its job."""
    folder = tmp_path_factory.mktemp("epoch")
    overrides = [
        "--training.steps=1 epochs",
        "--lr_scheduler.total_steps=0",
        "--metrics.log_freq=0.5 epochs",
        shards(folder, max_epochs=1),
    ]
    assert train(make_job(folder, corpus, *overrides)) == 0
    return folder, overrides


def test_one_epoch_is_within_max_epochs(one_epoch: tuple[Path, list[str]], corpus: Path) -> None:
    folder, overrides = one_epoch
    (source,) = json.loads((folder / "run/sources.json").read_text())["sources"]
    steps, half = source["sequences"] // 8, source["sequences"] // 16
    about = [f"# training.steps: 1 epoch = {steps} steps", f"# metrics.log_freq: 0.5 epochs = {half} steps"]
    for file in (folder / "run/job.toml", folder / f"run/checkpoint/step-{steps}/job.toml"):
        assert [line for line in file.read_text().splitlines() if line in about] == about
        recorded = load_job(file)
        assert (recorded.training.steps, recorded.metrics.log_freq) == (steps, half)
    assert metrics_in(folder / "run")[-1]["step"] == steps
    with pytest.raises(ConfigError, match="epochs, more than max_epochs = 1"):
        train(make_job(folder, corpus, *overrides, "--training.steps=1.1 epochs"))


@pytest.mark.full
def test_a_resume_converts_the_amounts_anew(
    one_epoch: tuple[Path, list[str]], corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, overrides = one_epoch
    shutil.copytree(folder / "run", tmp_path / "run")
    job = make_job(tmp_path, corpus, *overrides, "--training.steps=2 epochs", shards(folder, max_epochs=2))
    capfd.readouterr()
    assert train(job) == 0
    steps, more = (load_job(path / "run/job.toml").training.steps for path in (folder, tmp_path))
    assert more - 2 * steps in (0, 1)
    assert f": training.steps {steps} -> {more}\n" in capfd.readouterr().err
    assert metrics_in(tmp_path / "run")[-1]["step"] == more


def test_config_counts_epochs_once_the_data_can_be_opened(
    one_epoch: tuple[Path, list[str]], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, overrides = one_epoch
    file, text = write_toml(tmp_path, corpus), corpus / "a.jsonl"
    cases = {
        "opened": ["--ranks=1"],
        "not tokenised yet": [f"--data.sources=[{{name = 'text', path = ['{text}']}}]", "--ranks=1"],
        "no files": [],
    }
    shown = {}
    for case, words in cases.items():
        argv = ["config", str(file), f"--job.dump_folder={tmp_path / 'new'}", *overrides, *words]
        assert cli.run(argv) == 0
        shown[case] = capsys.readouterr().out
    steps = load_job(folder / "run/job.toml").training.steps
    assert f"\n# training.steps: 1 epoch = {steps} steps\n" in shown["opened"]
    assert f"\nsteps = {steps}\n" in shown["opened"]
    assert "not checked: the rules on numbers of steps" not in shown["opened"]
    for case in ("not tokenised yet", "no files"):
        assert "\n# training.steps: 1 epoch, counted once the data is open\n" in shown[case]
        assert "\n# not checked: the rules on numbers of steps\n" in shown[case]
        assert '\nsteps = "1 epoch"\n' in shown[case]
        (tmp_path / "again.toml").write_text(shown[case])
        assert str(load_job(tmp_path / "again.toml").training.steps) == "1 epoch"


def test_an_amount_that_is_no_step_is_refused_once_the_data_is_open(
    one_epoch: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, overrides = one_epoch
    argv = ["train", str(folder / "job.toml"), *overrides]
    assert cli.run([*argv, f"--job.dump_folder={folder / 'new'}", "--checkpoint.interval=0.01 epochs"]) == 2
    assert capsys.readouterr().err.endswith(
        "command line, --checkpoint.interval: '0.01 epochs' is less than one step, which takes 8 sequences "
        "of 32 tokens\n"
    )
    assert not (folder / "new").exists()


@pytest.mark.parametrize("world_size", [full(2), full(4)])
def test_tokens_on_ranks_with_a_batch_that_follows_from_them(
    world_size: int, tmp_path: Path, corpus: Path, run_on: Callable[..., list[None]]
) -> None:
    per_rank = ["--training.global_batch_size=-1", "--training.steps=3072 tokens"]
    run_on(world_size, train_on_rank, tmp_path, corpus, per_rank, "ranks", world_size)
    steps = [f"--training.steps={24 // world_size}", f"--training.global_batch_size={4 * world_size}"]
    train(make_job(tmp_path, corpus, *steps, name="whole"))
    ranks, whole = (metrics_in(tmp_path / name) for name in ("ranks", "whole"))
    assert [row["data/batch_sha"] for row in ranks] == [row["data/batch_sha"] for row in whole]


RAMP = '--training.batch_ramp=[{ until = "640 tokens", global_batch_size = 4 }]'


@pytest.mark.full
def test_one_epoch_under_a_ramp_is_within_max_epochs(
    one_epoch: tuple[Path, list[str]], tmp_path: Path, corpus: Path
) -> None:
    """Five steps of 4 sequences, and steps of 8 that end with the epoch."""
    _, overrides = one_epoch
    job = make_job(tmp_path, corpus, *overrides, RAMP)
    assert train(job) == 0
    (source,) = json.loads((tmp_path / "run/sources.json").read_text())["sources"]
    last = metrics_in(tmp_path / "run")[-1]
    assert last["step"] == 5 + (source["sequences"] - 20) // 8
    assert last["progress/sequences"] == 20 + 8 * (last["step"] - 5) > source["sequences"] - 8


@pytest.mark.full
def test_amounts_in_stages_are_the_numbers(tmp_path: Path, corpus: Path) -> None:
    """A step of the ramp has 4 sequences of 32 tokens, the others 8; the model has 26,848 parameters."""

    def staged(until: str, schedule: str) -> str:
        decay = f'until = "end", lr_scheduler = {{ name = "warmup_stable_decay", {schedule} }}'
        return f'--stages=[{{ until = "{until}" }}, {{ {decay} }}]'

    length = "--training.steps=12"
    in_numbers, in_tokens, in_parameters = (
        make_job(tmp_path / name, corpus, RAMP, length, *overrides)
        for name, overrides in {
            "numbers": ["--lr_scheduler.warmup_steps=5", staged("41 sequences", "warmup_steps = 2")],
            "tokens": [
                "--lr_scheduler.warmup_steps=640 tokens",
                staged("1312 tokens", 'warmup_steps = "520 tokens"'),
            ],
            "parameters": [
                "--lr_scheduler.warmup_steps=0.0239 tokens/parameter",
                staged("0.049 tokens/parameter", 'warmup_steps = "16 sequences"'),
            ],
        }.items()
    )
    for job in (in_numbers, in_tokens, in_parameters):
        assert train(job) == 0
    assert_same(in_tokens, in_numbers)
    assert_same(in_parameters, in_numbers)
    rates = [row["train/learning_rate"] / 3e-3 for row in metrics_in(in_numbers.folder)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[8:10] == pytest.approx([0.5, 1.0]), "the stage begins with the ninth step, at sequence 44"
