"""Pins `titanlite data show`: sequences of a dataset and of a run as text, with the documents' borders."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import save_steps
from tests.support.jobs import make_job, write_corpus
from titanlite import start
from titanlite.checkpoint.checkpointer import RunRecord
from titanlite.checkpoint.commit import manifest_text
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.corpus import prepare, show_data
from titanlite.data.skips import SkippedSequences
from titanlite.job import load_job
from titanlite.tokenizers.bytes import Bytes
from titanlite.tools.verbs import shown_config


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three documents of raw bytes in a known order."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name * 9}.")
    out = tmp_path / "out"
    prepare.main([str(tmp_path / "*.txt"), f"--output={out}", "--tokenizer.name=bytes"])
    return out


def shown(capsys: pytest.CaptureFixture[str], *argv: object) -> list[str]:
    capsys.readouterr()
    assert show_data.main(["show", *map(str, argv)]) == 0
    return capsys.readouterr().out.splitlines()


def test_sequences_of_a_dataset(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, dataset, "--sequence=1", "--seq_len=9")
    assert lines[0] == "==== sequence 1 of 3"
    assert lines[1] == "---- document 0, tokens 9 to 11"
    assert lines[3] == "---- document 1, tokens 0 to 6"
    assert (lines[2][-1], len(set(lines[4]))) == (".", 1)  # the end of one, BOS and letters of the next


def test_packed_sequences_show_padding(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--packing=best_fit", "--seq_len=31", f"--cache_dir={tmp_path}/cache"]
    lines = shown(capsys, dataset, "--sequence=0", "--num-sequences=2", *options)
    assert [line for line in lines if "====" in line] == ["==== sequence 0 of 2", "==== sequence 1 of 2"]
    padding = [line for line in lines if "padding" in line]
    assert padding == ["---- 8 tokens of padding", "---- 20 tokens of padding"]
    assert sum("tokens 0 to 11" in line for line in lines) == 3


def test_sequences_of_a_run_are_those_it_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path)
    job = make_job(tmp_path, corpus)
    (tmp_path / "resolved.toml").write_text(toml.dump(job))
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/job.toml").write_text(toml.dump(job))
    sequences = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    for number in (0, 7, 12_345):
        lines = shown(capsys, tmp_path / "resolved.toml", f"--sequence={number}")
        assert shown(capsys, tmp_path / "a run", f"--sequence={number}") == lines
        assert lines[0].startswith(f"==== training sequence {number:,}: sequence ")
        text = "".join(line for line in lines[1:] if not line.startswith("----"))
        (sequence,) = sequences.training(np.array([number]))
        assert text == Bytes().build().decode(sequence.tokens.tolist())


def marked(capsys: pytest.CaptureFixture[str], *argv: object) -> list[int]:
    """The numbers of the first eight sequences that are marked as skipped."""
    heads = [line for line in shown(capsys, *argv, "--num-sequences=8") if line.startswith("====")]
    assert len(heads) == 8
    return [n for n, line in enumerate(heads) if line.endswith(" (skipped)")]


def test_sequences_that_a_run_skips_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the configuration, and those that only the newest checkpoint knows."""
    job = make_job(tmp_path, write_corpus(tmp_path))
    file = tmp_path / "resolved.toml"
    file.write_text(toml.dump(job))
    assert marked(capsys, file) == []
    assert marked(capsys, file, "--data.skip_sequences=[[5, 6]]") == [5, 6]
    toy, run = save_steps(job.folder, 1)
    assert marked(capsys, file) == []
    toy.step()
    toy.state.skipped = SkippedSequences.merge([[1, 3]])
    sequences = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    run.record = RunRecord(job.identity(sequences.identity, sequences.names), run.record.job_toml)
    run.save(toy.state)
    run.close()
    assert marked(capsys, file, "--data.skip_sequences=[[5, 6]]") == [1, 2, 3, 5, 6]
    assert marked(capsys, file, "--training.seed=7") == []  # its numbers are those of other sequences
    manifest_file = job.folder / "checkpoint/step-2/manifest.json"
    manifest = json.loads(manifest_file.read_text()) | {"format": 4}
    del manifest["sha256"]
    manifest_file.write_text(manifest_text(manifest))
    capsys.readouterr()
    assert show_data.main(["show", str(file), "--data.skip_sequences=[[1, 1]]", "--sequence=1"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].endswith(" (skipped)")
    assert "are marked from its configuration only" in said.err
    assert "has checkpoint format 4" in said.err


def test_steps_of_a_batch_ramp_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ramp = '--training.batch_ramp=[{ until = "8 sequences", global_batch_size = 4 }]'
    job = make_job(tmp_path, write_corpus(tmp_path), "--training.local_batch_size=4", ramp)
    (tmp_path / "ramp.toml").write_text(toml.dump(job))
    heads = [h for h in shown(capsys, tmp_path / "ramp.toml", "--num-sequences=17") if h.startswith("====")]
    steps = [re.findall(r", step (\d+): sequence", head) for head in heads]
    assert steps == [["1"]] * 4 + [["2"]] * 4 + [["3"]] * 8 + [["4"]]


STAGES = """
[[stages]]
name = "short"
until = "16 sequences"
seq_len = 8
weights = { "b.txt" = 1 }

[[stages]]
name = "main"
until = "30 sequences"

[[stages]]
until = "end"
weights = [1, 0]
"""


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A job with three stages; a step of eight sequences goes from stage 2 on into stage 3."""
    job = make_job(tmp_path, write_corpus(tmp_path))
    (tmp_path / "staged.toml").write_text(toml.dump(job).replace("stages = []\n", "") + STAGES)
    return tmp_path / "staged.toml"


def test_a_run_with_stages_shows_the_sequences_that_it_trains_on(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [h for h in shown(capsys, staged, "--num-sequences=34") if h.startswith("==== training")]
    job = load_job(staged)
    sequences = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    plain = [sequences.origin(n) for n in range(34)]
    start.open_stages(job, 1, sequences)
    origins = [sequences.origin(n) for n in range(34)]
    for n, (packed, local) in enumerate(origins):
        step = 1 + n // 8
        text = ["stage 1 (short)", "stage 1 (short)", "stage 2 (main)", "stage 2 (main)", "stage 3"][step - 1]
        text += " (chosen by the weights of stage 3)" if n in (30, 31) else ""
        assert heads[n] == (
            f"==== training sequence {n}, step {step}, {text}: sequence {local} of {packed.shards.path}"
        )
    assert origins != plain  # control: without the stages' weights, the heads name other sequences
    assert {packed for packed, _ in origins[:16]} != {packed for packed, _ in origins[30:]}


def test_shorter_sequences_are_marked_where_they_begin(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(staged)
    sequences = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    start.open_stages(job, 1, sequences)
    for number, splits in ((3, 4), (15, 4), (16, 1)):
        lines = shown(capsys, staged, f"--sequence={number}")
        marks = [line for line in lines if line.startswith("---- shorter")]
        numbers = range(1, 5) if splits == 4 else ()
        assert marks == [f"---- shorter sequence {i} of 4, 8 tokens" for i in numbers]
        texts, (sequence,) = [""], sequences.training(np.array([number]))
        for line in lines[1:]:
            if line.startswith("---- shorter") and texts[-1]:
                texts.append("")
            elif not line.startswith("----"):
                texts[-1] += line
        cuts = [0, 8, 16, 24, 33] if splits == 4 else [0, 33]
        pieces = [sequence.tokens[a:b].tolist() for a, b in pairwise(cuts)]
        assert texts == [Bytes().build().decode(piece) for piece in pieces]


def test_a_checkpoint_marks_skips_only_if_the_stages_before_it_are_the_same(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(staged)
    toy, run = save_steps(job.folder, 0)
    toy.step()
    toy.state.num_sequences = 20
    toy.state.skipped = SkippedSequences.merge([[1, 3]])
    sequences = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    start.open_stages(job, 1, sequences)
    run.record = RunRecord(job.identity(sequences.identity, sequences.names), run.record.job_toml)
    run.save(toy.state)
    run.close()
    assert marked(capsys, staged) == [1, 2, 3]
    assert marked(capsys, staged, "--stages.2.weights=[0, 1]") == [1, 2, 3]  # lies in the future
    assert marked(capsys, staged, "--stages.1.weights=[0, 1]") == []
    assert marked(capsys, staged, "--stages.0.until=17 sequences") == []


def test_a_stage_that_does_not_fit_the_sources_is_refused(staged: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages\.2\.weights: stage 3: 3 weights for 2 sources"):
        show_data.main(["show", str(staged), "--stages.2.weights=[1, 1, 1]"])


def test_a_configuration_that_comes_with_titanlite_is_shown_unless_a_dataset_has_its_name(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dataset.parent)
    assert shown_config("debug") == "debug"
    assert shown_config("debgu") is None
    assert shown_config("out") is None
    dataset.rename("debug")
    assert shown_config("debug") is None
    (dataset.parent / "debug/job.toml").write_text("")
    assert shown_config("debug") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence=3", "--seq_len=9"], r"has 3 sequences of 9 tokens, numbered from 0"),
        (["--sequence=x"], r"--sequence: 'x' is not an integer from 0"),
        (["--num-sequences=0"], r"--num-sequences: 0 is not at least 1"),
        (["--seqlen=9"], r"unknown key 'seqlen'; did you mean 'seq_len'"),
        (["--tokenizer={name = 'tiktoken'}"], r"was made with tokenizer bytes-0000000001, this one is"),
    ],
)
def test_a_wrong_word(dataset: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        show_data.main(["show", str(dataset), *arguments])
    with pytest.raises(ConfigError, match="did you mean 'show'"):
        show_data.main(["shwo", str(dataset)])
