"""Pins `titanlite verify-resume`: equal bits with the key, how far off without it, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import tiny_arguments
from titanlite.config.component import ConfigError
from titanlite.lab import verify_resume
from titanlite.lab.trial_runs import RunFailed

BATCH = ["--training.local_batch_size=2", "--training.global_batch_size=8"]


def arguments(folder: Path, corpus: Path, *words: str) -> list[str]:
    config, *rest = tiny_arguments(folder, corpus)
    return [config, *words, *rest, *BATCH]


def test_parts_of_the_resumed_run() -> None:
    assert verify_resume.parts([1, 2, 4], 6) == [(2, 3), (4, 6)]
    assert verify_resume.parts([1, 2], 6) == verify_resume.parts([2], 6) == [(2, 3), (2, 6)]
    assert verify_resume.parts([1, 2, 4, 8], 4) == [(2, 1), (4, 2), (8, 4)]


@pytest.mark.full
def test_with_the_key_bits_are_equal(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ranks=2,1,4", "--steps=3", "--training.same_bits_on_any_ranks"]
    assert verify_resume.main(arguments(tmp_path, corpus, *words)) == 0
    table, last = capsys.readouterr().out.strip().rsplit("\n", 1)
    steps = table.count("(2 ranks)")  # a part may be stopped late
    assert steps >= 3
    assert table.count("equal") == steps == table.count("(1 rank)") + table.count("(4 ranks)")
    assert 0 < table.count("(1 rank)") < steps
    assert last.startswith(f"equal bits of weights in {steps} steps")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_without_the_key_the_difference_is_told(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_resume.main(arguments(tmp_path, corpus, "--ranks=1,2", "--steps=3")) == 0
    last = capsys.readouterr().out.strip().rsplit("\n", 1)[1]
    assert last.startswith("the weights differ from step 1 on, first in model.")
    assert "e-0" in last.partition("losses: ")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks=1,x"], "'1,x' is not a list of numbers such as 1,2,4"),
        (["--ranks=1,2,4", "--steps=2"], "2 is below 3, for as many"),
        (["--ranks=1,2", "--steps=100"], "is below the --steps=100 to train"),
        (["--ranks=1,3"], "8 sequences are not a multiple of local_batch_size 2 x 3 ranks"),
    ],
)
def test_bad_input(tmp_path: Path, corpus: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify_resume.main(arguments(tmp_path, corpus, *words))


@pytest.mark.full
def test_a_run_that_fails_is_told_in_one_line(tmp_path: Path, corpus: Path) -> None:
    words = ["--ranks=1", "--training.seq_len=64", "--tokenizer.path=/nowhere", "--tokenizer.name=tiktoken"]
    with pytest.raises(RunFailed, match="the run on 1 rank ended with exit code 2: "):
        verify_resume.main(arguments(tmp_path, corpus, *words))
