"""`titanlite data plan`: its numbers against counting step by step and sequence by sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import save_steps
from tests.support.jobs import make_job, write_corpus
from titanlite import cli, start
from titanlite.checkpoint.checkpointer import RunRecord
from titanlite.config import toml
from titanlite.data.skips import SkippedSequences
from titanlite.job import Job, load_job

STAGES = """
[[training.batch_ramp]]
until = "20 sequences"
global_batch_size = 4

[[stages]]
name = "short"
until = "30 sequences"
seq_len = 8
weights = { "b.txt" = 3, "a.jsonl" = 1 }

[[stages]]
name = "main"
until = "1.9K tokens"
lr_factor = 0.5

[[stages]]
name = "decay"
until = "3K tokens"
weights = [1, 0]
global_batch_size = 12

[[stages]]
until = "end"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    job = make_job(tmp_path, write_corpus(tmp_path))
    text = toml.dump(job).replace("stages = []\n", "").replace("batch_ramp = []\n", "")
    (tmp_path / "staged.toml").write_text(text + STAGES)
    return tmp_path / "staged.toml"


def output(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.run(["data", "plan", *map(str, argv)]) == code
    said = capsys.readouterr()
    return said.out, said.err


def planned(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> dict[str, Any]:
    return json.loads(output(capsys, *argv, "--json", code=code)[0])


def trained(job: Job) -> list[dict[str, Any]]:
    """Each training sequence of a run on one rank, step by step: stage, step, rate, source, and its number
    among the sequences of the source."""
    sequences = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    job, stages = start.open_stages(job, 1, sequences)
    names, position, counts, all_sequences = sequences.source_names, 0, dict[str, int](), []
    for step in range(1, job.training.steps + 1):
        size = stages.step_sizes.at(position).global_batch_size
        rate = job.learning_rate(stages, step, position)
        for number in range(position, position + size):
            name = names[int(sequences.source_ids([number])[0])]
            own = counts[name] = counts.get(name, -1) + 1
            at = {"sequence": number, "stage": stages.number_at(number), "source": name, "own": own}
            all_sequences.append(at | {"step": step, "first": position, "rate": rate, "size": size})
        position += size
    return all_sequences


def test_the_numbers_are_those_of_counting(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, job = planned(capsys, file, "--training.steps=16"), load_job(file, ["--training.steps=16"])
    counted = trained(job)
    assert (plan["steps"], plan["sequences"], plan["tokens"]) == (16, len(counted), 32 * len(counted))
    epochs = {source["source"]: source["sequences_per_epoch"] for source in plan["sources"]}
    assert list(epochs) == ["a.jsonl", "b.txt"]
    for i, stage in enumerate(plan["stages"]):
        inside = [at for at in counted if at["stage"] == i]
        steps = [at for at in counted if at["sequence"] == at["first"] and at in inside]
        assert (stage["first_sequence"], stage["last_sequence"]) == tuple(
            inside[k]["sequence"] for k in (0, -1)
        )
        assert (stage["sequences"], stage["tokens"]) == (len(inside), 32 * len(inside))
        assert (stage["first_step"], stage["last_step"]) == (steps[0]["step"], steps[-1]["step"])
        assert stage["steps"] == len(steps)
        assert stage["learning_rates"] == [steps[0]["rate"], steps[-1]["rate"]]
        assert {at["size"] for at in steps} <= {size for _, size in stage["batch_sizes"]}
        for source in stage["sources"]:
            own = [at["own"] for at in inside if at["source"] == source["source"]]
            size = epochs[source["source"]]
            assert source["sequences"] == len(own)
            assert source["epochs"] == len(own) / size
            places = [list(divmod(own[k], size)) for k in (0, -1)] if own else [None, None]
            assert [source["first"], source["last"]] == [p and [p[0] + 1, p[1]] for p in places]
    assert [stage["seq_len"] for stage in plan["stages"]] == [8, 32, 32, 32]
    assert [size for _, size in plan["stages"][0]["batch_sizes"]] == [4, 8]
    for source in plan["sources"]:
        own = [at for at in counted if at["source"] == source["source"]]
        ends = [at for at in own if (at["own"] + 1) % epochs[source["source"]] == 0]
        assert [(end["sequence"], end["step"], end["stage"] - 1) for end in source["epoch_ends"]] == [
            (at["sequence"], at["step"], at["stage"]) for at in ends
        ]
    assert plan["sources"][1]["epoch_ends"]


def test_a_stage_after_the_end_is_not_reached(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [file, "--training.steps=7", "--lr_scheduler.total_steps=7"]
    plan = planned(capsys, *options)
    last = plan["stages"][-1]
    assert (last["sequences"], last["steps"], last["learning_rates"]) == (0, 0, None)
    assert [at["epochs_at_end"] for at in last["sources"]] == [source["epochs"] for source in plan["sources"]]
    assert "not reached" in output(capsys, *options)[0]
    last = planned(capsys, file, "--training.steps=13")["stages"][-1]  # the last step goes on into it
    assert (last["sequences"], last["steps"], last["learning_rates"]) == (3, 0, None)


def test_a_job_without_stages_is_one_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its text is tokenised first, and it is told that this happens."""
    job = make_job(tmp_path, write_corpus(tmp_path))
    (tmp_path / "plain.toml").write_text(toml.dump(job))
    assert not (tmp_path / "cache").exists()
    out, err = output(capsys, tmp_path / "plain.toml")
    assert "opening the data as a run does: text is tokenised" in err
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir()) == ["text", "text"]
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path}/plain.toml on 1 rank: 8 steps, 64 sequences of 32 tokens, 2,048 tokens"
    (stage,) = planned(capsys, tmp_path / "plain.toml")["stages"]
    assert (stage["sequences"], stage["steps"], stage["batch_sizes"]) == (64, 8, [[0, 8]])


def test_the_table_is_aligned_and_says_what_ends(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = output(capsys, file, "--data.sources.1.max_epochs=1.5", code=2)
    _, stages, sources, ends = [part.splitlines() for part in out.split("\n\n")]
    for part in (stages, sources, ends):
        column = part[0].index(" sequence") + 1  # numbers end where their head does
        width = len(part[0][column:].split("  ")[0])
        assert all(line[column + width - 1].isalnum() and line[column + width :][:1] in " " for line in part)
    assert [line.split()[1] for line in stages[1:4]] == ["short", "main", "decay"]
    assert "4, 8 from 20" in stages[1]
    exceeded = planned(capsys, file, "--data.sources.1.max_epochs=1.5", code=2)["sources"][1]
    place = exceeded["exceeds_max_epochs"]
    assert f"b.txt   max_epochs = 1.5 is exceeded  {place['sequence']:8}" in ends[-1]
    (line,) = [line for line in err.splitlines() if "max_epochs" in line]
    assert f"within the first {place['sequence']:,} of the" in line
    assert place["stage"] == 1
    assert "(in stage 1)" in line


def test_a_run_is_marked_where_it_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = load_job(file)
    sequences = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    job, _ = start.open_stages(job, 1, sequences)
    toy, run = save_steps(job.folder, 0)
    run.record = RunRecord(job.identity(sequences.identity, sequences.names), run.record.job_toml)
    for _ in range(7):
        toy.step()
    toy.state.num_sequences, toy.state.skipped = 36, SkippedSequences.merge([[33, 34]])
    run.save(toy.state)
    run.close()
    (job.folder / "job.toml").write_text(toml.dump(job))
    out = output(capsys, job.folder)[0]
    head, stages, *_ = [part.splitlines() for part in out.split("\n\n")]
    assert head[1].startswith("2 of the sequences are skipped")
    assert head[2] == "the run has taken 7 steps and continues with sequence 36"
    assert len(head) == 3
    other = output(capsys, job.folder, "--training.batch_ramp.0.until=12 sequences")[0].splitlines()
    assert other[3].startswith("the steps below are those of a run that has taken 6 steps to this sequence")
    assert [line.endswith("<- now") for line in stages[1:]] == [False, True, False, False]
    plan = planned(capsys, job.folder)
    assert plan["skipped_sequences"] == 2
    assert plan["at"] == {"step": 7, "sequence": 36, "stage": 2, "planned_step": 7}
    assert planned(capsys, file, "--stages.3.lr_factor=0.1")["at"] == plan["at"]  # a change of the future
    out, err = output(capsys, file, "--stages.1.weights=[1, 1]", code=2)
    assert "<- now" not in out  # the job cannot continue this run
    assert "only what comes later can change" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a TOML file or a run folder to plan"),
        (["FOLDER/x"], "name a TOML file or a run folder to plan: FOLDER/x is neither"),
        (["FILE", "--ranks=0"], "command line, --ranks: 0 is below 1"),
        (["FILE", "--ranks=3"], "8 sequences are not a multiple of local_batch_size 4 x 3 ranks = 12"),
        (["FILE", "--rank=3"], "unknown option '--rank'; did you mean '--ranks'?"),
        (["FILE", "--stages.1.until=9 sequences"], "stages.1.until: \"9 sequences\" is sequence 9, which"),
        (["FILE", "--stages.2.weights=[1]"], "stages.2.weights: stage 3 (decay): 1 weights for 2 sources"),
        (["nowhere.toml"], "nowhere.toml: cannot read the configuration"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    words = [word.replace("FILE", str(file)).replace("FOLDER", str(file.parent)) for word in argv]
    out, err = output(capsys, *words, code=2)
    assert out == ""
    (line,) = [
        line for line in err.splitlines() if "opening the data" not in line and "tokenising" not in line
    ]
    assert message.replace("FOLDER", str(file.parent)) in line
