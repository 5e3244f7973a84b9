"""Stages that do not fit their job are refused in one line, with the key of
the stage and what would be right, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import tiny_arguments
from tests.support.runs import PP, UNTIED, run_in_hops
from tests.support.staged import BATCH, RAMP, staged
from titanlite import cli

END = 'until = "end"'
SHORT = 'until = "30 sequences", name = "short"'

REFUSED = {
    "ends before it begins": (
        [staged(SHORT, 'until = "640 tokens"', END)],
        'stages.1.until: "640 tokens" is sequence 20, which is not after "30 sequences", where it begins, '
        "sequence 30",
    ),
    "ends at its first sequence": (
        [staged('until = "31 tokens"', END)],
        'stages.0.until: "31 tokens" is sequence 0, which is not after the start of the run, sequence 0',
    ),
    "a number of steps": (
        [staged('until = "30 steps"', END)],
        "stages.0.until: '30 steps' is no place in the data order: give tokens, sequences or epochs",
    ),
    "no end": (
        [staged(SHORT)],
        'stages.0.until: stage 1 (short): "30 sequences": the last stage must have until = "end"',
    ),
    "two ends": (
        [staged(END, END)],
        'stages.0.until: stage 1: only the last stage has until = "end"',
    ),
    "an unknown source": (
        [staged(f"{SHORT}, weights = {{ 'a.json' = 1 }}", END)],
        "stages.0.weights.a.json: stage 1 (short): unknown source 'a.json'; did you mean 'a.jsonl'? (known: "
        "a.jsonl, b.txt)",
    ),
    "a number of weights": (
        [staged(f"{SHORT}, weights = [1]", END)],
        "stages.0.weights: stage 1 (short): 1 weights for 2 sources: a.jsonl, b.txt",
    ),
    "a batch": (
        [staged(SHORT, f"{END}, global_batch_size = 6")],
        "stages.1.global_batch_size: 6 sequences are not a multiple of local_batch_size 4 x 2 ranks = 8; the "
        "nearest is 8",
    ),
    "a batch of the ramp": (
        ['--training.batch_ramp=[{ until = "10 sequences", global_batch_size = 20 }]'],
        "training.batch_ramp.0.global_batch_size: 20 sequences are not a multiple of local_batch_size 4 x 2 "
        "ranks = 8; the nearest are 16 or 24",
    ),
    "a rule of a ramp that is missing": (
        ["--training.batch_ramp_lr=sqrt"],
        'training.batch_ramp_lr: "sqrt" is a rule for [[training.batch_ramp]], which the job does not have',
    ),
    "a ramp out of order": (
        [
            *BATCH,
            '--training.batch_ramp=[{ until = "10 sequences", global_batch_size = 4 }, '
            '{ until = "5 sequences", global_batch_size = 8 }]',
        ],
        'training.batch_ramp.1.until: "5 sequences" is sequence 5, which is not after "10 sequences", where '
        "it begins, sequence 10",
    ),
    "micro-batches of a pipeline": (
        [*BATCH, UNTIED, PP, staged(SHORT, f"{END}, global_batch_size = 1")],
        "parallelism.pipeline_parallel_degree: 1F1B over 2 stages cannot run 1 micro-batches; 2 or a "
        "multiple works: stages.1.global_batch_size = 2, 4, 8",
    ),
    "a length for context parallel": (
        ["--parallelism.context_parallel_degree=2", staged(f"{SHORT}, seq_len = 2", END)],
        "stages.0.seq_len: a sequence length of 2 is no multiple of 2 x context_parallel_degree 2 x "
        "tensor_parallel_degree 1: each rank has two chunks of equal size of each sequence",
    ),
    "a length": (
        [staged(f"{SHORT}, seq_len = 24", END)],
        "stages.0.seq_len: stage 1 (short): 24 is not training.seq_len = 32 divided by a power of 2: 32, 16, "
        "8, 4",
    ),
    "a longer length": (
        [staged(f"{SHORT}, seq_len = 64", END)],
        "stages.0.seq_len: stage 1 (short): 64 is not training.seq_len = 32 divided by a power of 2: 32, 16, "
        "8, 4. Sequences are packed once, at training.seq_len; to train on longer ones, start a new run from "
        "the weights of this one, with checkpoint.initial_load_path",
    ),
    "a schedule": (
        [staged(SHORT, f'{END}, lr_scheduler = {{ name = "warmup_stable_decay", warmup_steps = 9 }}')],
        "stages.1.lr_scheduler.warmup_steps: stage 2: 9 steps of warmup need a schedule of more than 4 "
        "steps; set warmup_steps = 0, or -1, which means 0 here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_stages_are_refused_in_one_line(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    overrides, said = REFUSED[case]
    assert cli.run(["config", *tiny_arguments(tmp_path, corpus), *overrides, "--ranks=2"]) == 2
    assert capfd.readouterr().err == f"titanlite: command line, --{said}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_source_that_runs_out_is_named_with_the_stage_and_the_place(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ["--data.sources.1.max_epochs=1", staged(SHORT, f"{END}, weights = [0, 1]")]
    assert cli.run(["train", *tiny_arguments(tmp_path, corpus), *keys]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    # 8 of the first 30 sequences are of b.txt, which has 13, and so are all later ones
    said = "more than max_epochs = 1. Lower training.steps to end within the first 35 of the 64 sequences "
    assert f"epochs, {said}(in stage 2), or lower the source's weight" in last
    run_in_hops(tmp_path, corpus, [4], *keys, name="shorter")


@pytest.mark.full
def test_a_weight_that_is_too_small_is_refused_by_stage(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = [staged(SHORT, f"{END}, weights = [1, 1e-5]")]
    assert cli.run(["train", *tiny_arguments(tmp_path, corpus), *keys]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("titanlite: command line, --stages.1.weights: ")
    assert ": the weight 1e-05 is too small a share of 1.00001; the smallest share is 1/1000" in last


@pytest.mark.full
def test_ends_in_epochs_are_counted_once_the_data_is_open(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny_arguments(tmp_path, corpus), staged('until = "0.1 epochs"', END), *RAMP, *BATCH]
    for ranks in ([], ["--ranks=1"]):
        assert cli.run(["config", *arguments, *ranks]) == 0
        shown = capfd.readouterr().out
        assert "\n# stages.0.until: 0.1 epochs, counted once the data is open\n" in shown
        assert '{ until = "0.1 epochs", ' in shown
    assert cli.run(["train", *arguments]) == 0
    assert "stages.0.until: 0.1 epochs = 30 sequences\n" in capfd.readouterr().err
    late = [*arguments, staged('until = "1 epochs"', 'until = "100 sequences"', END)]
    assert cli.run(["train", *late, f"--job.dump_folder={tmp_path / 'new'}"]) == 2
    said = '"100 sequences" is sequence 100, which is not after "1 epochs", where it begins, sequence 307'
    assert capfd.readouterr().err.endswith(f"command line, --stages.1.until: {said}\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.full
def test_other_lengths_need_a_new_run_from_the_weights(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = [staged(f"{SHORT}, seq_len = 16", END)]
    run_in_hops(tmp_path, corpus, [4], *keys, name="run")
    capfd.readouterr()
    assert cli.run(["train", *tiny_arguments(tmp_path, corpus), *keys, "--training.seq_len=64"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert "holds a run that differs: training.seq_len was 32, is 64. Undo the change, or start a new" in last
    assert f"--checkpoint.initial_load_path={tmp_path}/run/checkpoint" in last
