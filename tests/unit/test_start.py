"""The start of a run says what follows from its configuration and is not written there: the model's resolved
shape, its size, the tokenizer's ids, the parameter groups, the schedule. So do `titanlite config` and the
recorded job.toml.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.golden import EXPERTS
from tests.support.jobs import make_job
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.losses import CrossEntropy
from titanlite.start import MAX_PARAMETERS_WITH_GRAPHS, check_resumed, records_by_default
from titanlite.train import train

AUTO = "--lr_scheduler.warmup_steps=-1"
SHAPE = "vocab_size=8192 dim=32 n_layers=2 n_heads=4 n_kv_heads=2 head_dim=8 hidden_dim=64"


@pytest.mark.parametrize(
    ("trained", "text"),
    [
        ([[5, 5]], "sequence 5: "),
        ([[5, 6]], "sequences 5 to 6: "),
        ([[5, 5], [7, 8]], "sequences 5, 7 to 8: "),
    ],
)
def test_the_sequences_that_cannot_be_skipped_any_more(tmp_path: Path, trained: list, text: str) -> None:
    job = make_job(tmp_path, tmp_path, f"--data.skip_sequences={trained}")
    with pytest.raises(ConfigError, match=f"^the run has already trained on {text}"):
        check_resumed(job, 8, {"skipped": [], "sequences": 9, "step": 1, "global_batch_size": 8})


def test_a_global_batch_changes_only_if_the_file_says_so(tmp_path: Path) -> None:
    train_json = {"skipped": [], "sequences": 8, "step": 1, "global_batch_size": 8}
    follows = make_job(tmp_path, tmp_path, "--training.global_batch_size=-1")
    message = r"takes 8 sequences per step; global_batch_size = -1 would make it 4 here"
    with pytest.raises(ConfigError, match=message):
        check_resumed(follows, 4, train_json)
    check_resumed(follows, 8, train_json)
    check_resumed(make_job(tmp_path, tmp_path, "--training.global_batch_size=4"), 4, train_json)


def test_a_resume_opens_each_small_file_of_its_checkpoint_once(tmp_path: Path, corpus: Path) -> None:
    """The start is decided once, and the decision is passed on. The save that follows reads nothing again."""
    train(make_job(tmp_path, corpus, "--training.steps=2"))
    step, opened = tmp_path / "run/checkpoint/step-2", Counter[str]()
    is_counting = True

    def count(event: str, args: tuple[Any, ...]) -> None:  # a hook stays until the process ends
        if is_counting and event == "open" and isinstance(args[0], (str, Path)):
            opened[str(args[0])] += 1

    sys.addaudithook(count)
    assert train(make_job(tmp_path, corpus, "--training.steps=4")) == 0
    is_counting = False
    for name in ("manifest.json", "train.json", "job.toml", ".metadata"):
        assert opened[str(step / name)] == 1, name


@pytest.mark.parametrize(
    ("overrides", "parameters", "device", "world_size", "records"),
    [
        ([], MAX_PARAMETERS_WITH_GRAPHS, "cuda", 1, True),
        (["--no-compile.enable"], 10, "cuda", 1, False),
        ([], MAX_PARAMETERS_WITH_GRAPHS + 1, "cuda", 1, False),
        ([], 10, "cpu", 1, False),
        ([], 10, "cuda", 2, False),
        (["--data.mask_documents"], 10, "cuda", 1, False),
        (["--training.same_bits_on_any_ranks"], 10, "cuda", 1, False),
        (["--model.name=qwen3_moe", *EXPERTS], 10, "cuda", 1, False),
    ],
)
def test_which_jobs_run_by_cuda_graphs_by_default(
    tmp_path: Path, overrides: list[str], parameters: int, device: str, world_size: int, records: bool
) -> None:
    job = make_job(tmp_path, tmp_path, "--compile.enable", *overrides)
    assert records_by_default(job, parameters, torch.device(device), world_size) == records


def test_a_loss_from_outside_gets_no_cuda_graphs_by_default(tmp_path: Path) -> None:
    class Outside(CrossEntropy):
        """A loss of another package."""

    job = make_job(tmp_path, tmp_path, "--compile.enable")
    assert records_by_default(job, 10, torch.device("cuda"), 1)
    assert not records_by_default(replace(job, loss=Outside()), 10, torch.device("cuda"), 1)


def test_a_new_run_that_is_refused_for_its_epochs_leaves_no_folder(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--data.sources.0.max_epochs=0.01")
    with pytest.raises(ConfigError, match=r"more than max_epochs = 0\.01") as e:
        train(job)
    assert e.value.key == "data.sources.0.max_epochs"
    assert not job.folder.exists()
    allowed = make_job(tmp_path, corpus, "--training.steps=1", AUTO)  # control
    assert train(allowed) == 0
    assert allowed.folder.exists()


def test_the_resolved_shape_and_warmup_are_logged_and_recorded(tmp_path: Path, corpus: Path, capfd) -> None:
    job = make_job(
        tmp_path, corpus, "--model.overrides.vocab_size=8192", "--model.overrides.rope_theta=1e4",
        "--training.steps=1", AUTO, "--lr_scheduler.total_steps=30",
        "--training.local_batch_size=8",
    )  # fmt: skip
    assert train(job) == 0
    lines = [
        "llama3 debug with overrides: 280,736 parameters",
        f"{SHAPE} rope_theta=10000.0; the tokenizer has 258 ids",
        "adamw: 15 tensors of 280,576 parameters, peak learning rate 0.003, weight decay 0.1",
        "adamw: 5 tensors of 160 parameters, peak learning rate 0.003, weight decay 0",
        "learning rate: warmup_stable_decay over 30 steps, 3 of them warmup",
    ]
    log = capfd.readouterr().err
    recorded = [job.folder / "job.toml", job.folder / "checkpoint/step-1/job.toml"]
    for line in lines:
        assert f" {line}\n" in log
    assert ": 1 micro-batch of " in log
    for file in recorded:
        assert file.read_text().splitlines()[: len(lines)] == [f"# {line}" for line in lines]
        again = load_job(file)
        assert again == job, "comments do not change the job"
        assert again.lr_scheduler.warmup_steps == -1


def test_config_shows_the_resolved_shape(tmp_path: Path, corpus: Path, capsys) -> None:
    make_job(tmp_path, corpus)
    arguments = [
        "config",
        str(tmp_path / "job.toml"),
        "--model.overrides.dim=36",
        "--lr_scheduler.warmup_steps=-1",
    ]
    assert cli.run(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("# llama3 debug with overrides: ")
    shape = SHAPE.replace("8192", "258").replace("dim=32", "dim=36", 1)
    assert f"\n# {shape}\n" in out  # n_heads x head_dim is not dim: legal, and there to be seen
    assert "\n# learning rate: warmup_stable_decay over 16 steps, 1 of them warmup\n" in out
    (tmp_path / "again.toml").write_text(out)
    assert load_job(tmp_path / "again.toml").model.config.dim == 36


@pytest.mark.parametrize("verb", ["train", "config"])
def test_a_longer_sequence_than_max_position_names_the_override(verb, tmp_path, capsys) -> None:
    argv = [verb, "debug", f"--job.dump_folder={tmp_path}", "--training.seq_len=4096"]
    assert cli.run(argv) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        "command line, --training.seq_len: 4096 tokens are more than max_position = 2048 of llama3 debug; "
        "for a new model, --model.overrides.max_position=4096 allows them\n"
    )
    job = load_job("debug", ["--training.seq_len=4096", "--model.overrides.max_position=4096"])
    assert job.training.seq_len == 4096


def test_a_run_with_nothing_to_train_keeps_its_files(tmp_path: Path, corpus: Path) -> None:
    def start(steps: int) -> dict[str, str]:
        job = make_job(tmp_path, corpus, f"--training.steps={steps}", "--lr_scheduler.total_steps=9")
        assert train(job) == 0
        return {name: (job.folder / name).read_text() for name in ("job.toml", "env.json", "sources.json")}

    trained = start(2)
    assert start(1) == start(2) == trained
    assert start(3) != trained  # control
    assert json.loads(trained["env.json"])["layout"] == "unsharded"
