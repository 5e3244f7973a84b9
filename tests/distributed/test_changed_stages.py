"""Stages that are added to a running job, changed or removed: what lies in the future may change, what lies
in the past is refused in one line before anything is written."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.datasets import write_dataset
from tests.support.jobs import metrics_of, tiny_arguments
from tests.support.runs import assert_same, history, run_in_hops
from tests.support.staged import DECAY, MAIN, SHORT, STAGED, STEPS, assert_no_repeats, opened, sha_of, staged
from tests.support.tiers import full
from titanlite import cli
from titanlite.job import Job
from titanlite.tokenizers.bytes import Bytes

STOPPED = 5  # at sequence 36, in the stage "main", which began with sequence 30


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The run in three stages, stopped in the second one."""
    return run_in_hops(tmp_path_factory.mktemp("stopped"), corpus, [STOPPED], *STAGED, name="run")


def tokens_source(folder: Path, num_sequences: int, seed: int) -> str:
    """A source of random tokens with this number of sequences of 32 tokens."""
    ids = np.random.default_rng(seed).integers(0, 256, (num_sequences, 32))
    write_dataset(folder / f"tokens{seed}", [*ids.tolist(), [0]], Bytes().build())
    return f'name = "tokens", path = "{folder}/tokens{seed}"'


@pytest.mark.full
def test_a_changed_mixture_repeats_nothing(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four steps of 250 sequences at 0.9/0.1 and four at 0.5/0.5, as two stages from the start, and as a
    stage that is added to a running job."""
    sources = [tokens_source(tmp_path, 2211, 0), tokens_source(tmp_path, 528, 1)]
    tables = ", ".join(f"{{ {source}, weight = {w} }}" for source, w in zip(sources, (9, 1)))
    keys = [
        "--training.local_batch_size=50",
        "--training.global_batch_size=250",
        f"--data.sources=[{tables}]",
    ]
    keys += ["--data.holdout_sequences=0"]
    stages = staged('until = "1000 sequences"', 'until = "end", weights = [1, 1]')
    whole = run_in_hops(tmp_path, corpus, [8], *keys, stages, name="whole")
    log = capfd.readouterr().err
    assert "tokens0: 70.0% of the sequences, 0.63 epochs of 2,211" in log
    assert "tokens1: 30.0% of the sequences, 1.14 epochs of 528" in log
    sequences = opened(whole)
    assert_no_repeats(sequences, 2000)
    shas = [sha_of(sequences, *range(first, first + 250)) for first in range(0, 2000, 250)]
    assert [line["data/batch_sha"] for line in metrics_of(whole)] == shas
    run_in_hops(tmp_path, corpus, [4], *keys, name="added")
    assert_same(run_in_hops(tmp_path, corpus, [8], *keys, stages, name="added"), whole)


MIDDLE = 'until = "80 sequences", weights = [1, 1]'
IN_THE_FUTURE = {
    "added": staged(SHORT, MAIN, MIDDLE, DECAY),
    "removed": staged(SHORT, MAIN.replace("60 sequences", "end")),
    "moved": staged(SHORT, MAIN.replace("60", "50"), DECAY),
    "other weights": staged(SHORT, MAIN, DECAY.replace("[0, 1]", "{ 'a.jsonl' = 1 }")),
    "settings of the present stage": staged(SHORT, f"{MAIN}, global_batch_size = 4, lr_factor = 0.1", DECAY),
}


@pytest.mark.full
@pytest.mark.parametrize("change", IN_THE_FUTURE)
def test_a_stage_in_the_future_may_change(
    stopped: Job, tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    """The sequences are those of a run that had the stages from the start."""
    shutil.copytree(stopped.folder, tmp_path / "run")
    job = run_in_hops(tmp_path, corpus, [7, STEPS], *STAGED, IN_THE_FUTURE[change], name="run")
    if change == "settings of the present stage":
        said = "changed since step 5: stages.1.global_batch_size absent -> 4\n"
        assert said in capfd.readouterr().err
    lines, sequences = metrics_of(job), opened(job)
    assert_no_repeats(sequences, lines[-1]["progress/sequences"])
    positions = [0, *(line["progress/sequences"] for line in lines)]
    shas = [sha_of(sequences, *range(*places)) for places in itertools.pairwise(positions)]
    assert [line["data/batch_sha"] for line in lines] == shas
    whole = run_in_hops(tmp_path, corpus, [STEPS], *STAGED, name="whole")
    assert history(job)[:STOPPED] == history(whole)[:STOPPED]
    assert history(job) != history(whole)


def has_end(until: str) -> str:
    return SHORT.replace("30 sequences", until)


PRESENT = "The run is at sequence 36, and only what comes later can change"
IN_THE_PAST = {
    "earlier": (
        [staged(has_end("28 sequences"), MAIN, DECAY)],
        "stages.0.until: stage 2 of the run begins with sequence 30; here it begins with sequence 28. "
        f'{PRESENT}: end stage 1 with until = "30 sequences"',
    ),
    "later": (
        [staged(has_end("40 sequences"), MAIN, DECAY)],
        "stages.0.until: stage 2 of the run begins with sequence 30; here it has not begun. "
        f'{PRESENT}: end stage 1 with until = "30 sequences"',
    ),
    "between": (
        [staged(SHORT, MAIN.replace("60", "32"), DECAY)],
        "stages.1.until: stage 3 of the run has not begun; here it begins with sequence 32. "
        f'{PRESENT}: end stage 2 with until = "36 sequences" or later',
    ),
    "removed": (
        [staged(DECAY)],
        "stages.0.until: stage 2 of the run begins with sequence 30; here it has not begun. "
        f'{PRESENT}: end stage 1 with until = "30 sequences"',
    ),
    "length": (
        [staged(SHORT.replace("seq_len = 16, ", ""), MAIN, DECAY)],
        f"stages.0.seq_len: seq_len of stage 1 was 16, is absent. {PRESENT}: undo the change",
    ),
    "batch": (
        [staged(f"{SHORT}, global_batch_size = 4", MAIN, DECAY)],
        "stages.0.global_batch_size: global_batch_size of stage 1 was absent, is 4. "
        f"{PRESENT}: undo the change",
    ),
    "schedule": (
        [staged(f'{SHORT}, lr_scheduler = {{ name = "piecewise", points = [[1, 1.0]] }}', MAIN, DECAY)],
        'stages.0.lr_scheduler.name: lr_scheduler.name of stage 1 was absent, is "piecewise". '
        f"{PRESENT}: undo the change",
    ),
    "weights": (
        [staged(SHORT.replace("a.jsonl", "b.txt"), MAIN, DECAY)],
        "stages.0.weights: stage 1: its sequences were text CORPUS/a.jsonl 100%; here they are text "
        f"CORPUS/b.txt 100%. {PRESENT}: undo the change",
    ),
    "weights of [data]": (
        ["--data.sources.1.weight=2"],
        "stages.1.weights: stage 2: its sequences were text CORPUS/b.txt 25%, text CORPUS/a.jsonl 75%; here "
        f"they are text CORPUS/b.txt 40%, text CORPUS/a.jsonl 60%. {PRESENT}: undo the change",
    ),
}


@pytest.mark.parametrize("change", ["later", *(full(name) for name in IN_THE_PAST if name != "later")])
def test_a_stage_in_the_past_is_refused_in_one_line(
    stopped: Job, corpus: Path, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    path, *where = tiny_arguments(stopped.folder.parent, corpus)
    overrides, said = IN_THE_PAST[change]
    before = {p: p.stat().st_mtime_ns for p in stopped.folder.rglob("*")}
    capfd.readouterr()
    assert cli.run(["train", path, *where, *STAGED, *overrides, f"--training.steps={STEPS}"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.endswith(f"command line, --{said.replace('CORPUS', str(corpus))}")
    assert {p: p.stat().st_mtime_ns for p in stopped.folder.rglob("*")} == before


WEIGHTS = {"a.jsonl": 3, "b.txt": 1}


def with_source(folder: Path, corpus: Path, weight: float = 1.0) -> list[str]:
    """Overrides: the sources of the base job and a new one, which only the stage "decay" reads."""
    texts = [f'{{ name = "text", path = ["{corpus}/{name}"], weight = {w} }}' for name, w in WEIGHTS.items()]
    tables = f"{', '.join(texts)}, {{ {tokens_source(folder, 40, 2)}, weight = {weight} }}"
    decay = DECAY.replace("[0, 1]", '{ "b.txt" = 1, tokens2 = 1 }')
    return [f"--data.sources=[{tables}]", staged(SHORT, f"{MAIN}, weights = [3, 1, 0]", decay)]


@pytest.mark.full
@pytest.mark.parametrize(("num_held_out", "weight"), [(0, 1.0), (10, 0.0)])
def test_a_later_stage_may_read_a_new_source(
    tmp_path: Path, corpus: Path, num_held_out: int, weight: float
) -> None:
    """With sequences held out of the sources by their weights, if the weight of the new source is 0."""
    keys = [*STAGED, f"--data.holdout_sequences={num_held_out}"]
    new = with_source(tmp_path, corpus, weight)
    run_in_hops(tmp_path, corpus, [STOPPED], *keys, name="run")
    job = run_in_hops(tmp_path, corpus, [8, STEPS], *keys, *new, name="run")
    whole = run_in_hops(tmp_path, corpus, [STEPS], *keys, *new, name="whole")
    assert_same(job, whole)
    sequences = opened(job)
    assert {sequences.origin(n)[0].shards.path.name for n in range(60, 100)} >= {"tokens2"}
    assert_no_repeats(sequences, 100)


@pytest.mark.full
def test_a_new_source_that_holds_out_sequences_is_refused(
    stopped: Job, tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, *where = tiny_arguments(stopped.folder.parent, corpus)
    capfd.readouterr()
    assert cli.run(["train", path, *where, *STAGED, *with_source(tmp_path, corpus)]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    said = "data.holdout_sequences are split over the sources by other weights of data.sources. Undo the"
    assert f"{stopped.folder}/checkpoint holds a run that differs: {said} change" in last


@pytest.mark.full
def test_the_command_that_only_checks_refuses_the_same(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the data is tokenised already, as shards are."""
    tables = ", ".join(f"{{ {tokens_source(tmp_path, size, seed)} }}" for seed, size in enumerate((300, 50)))

    def keys(first: str, second: str) -> list[str]:
        begin = [f'until = "{first}", weights = [1, 0]', f'until = "{second}"']
        return [f"--data.sources=[{tables}]", staged(*begin, 'until = "end", weights = [0, 1]')]

    run_in_hops(tmp_path, corpus, [5], *keys("30 sequences", "60 sequences"), name="run")
    for ends, said in {
        ("20 sequences", "60 sequences"): 'end stage 1 with until = "30 sequences"',
        ("0.1 epochs", "60 sequences"): 'end stage 1 with until = "30 sequences"',
        ("30 sequences", "39 sequences"): 'end stage 2 with until = "40 sequences" or later',
        ("30 sequences", "41 sequences"): "",
    }.items():
        capfd.readouterr()
        argv = ["config", *tiny_arguments(tmp_path, corpus), *keys(*ends), "--ranks=1"]
        assert cli.run(argv) == (2 if said else 0)
        assert capfd.readouterr().err.endswith(f"{said}\n" if said else "")


@pytest.mark.full
def test_a_run_that_goes_back_may_change_what_then_lies_ahead(tmp_path: Path, corpus: Path) -> None:
    keep = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
    other = staged(SHORT, MAIN.replace("60", "50"), DECAY)
    run_in_hops(tmp_path, corpus, [8], *STAGED, *keep, name="run")  # at sequence 76, in the stage "decay"
    job = run_in_hops(tmp_path, corpus, [STEPS], *STAGED, other, "--checkpoint.load_step=5", name="run")
    assert_same(job, run_in_hops(tmp_path, corpus, [STEPS], *STAGED, other, name="whole"))
