"""A run on any layout trains as one process does: losses and their statistics, gradient norms, sequences,
names and weights.

test_gradients.py, test_pipeline.py and test_families.py compare gradients on every axis and on the difficult
pairs of axes; test_resume.py trains on a chain of layouts. The whole runs here have other options. The full
tier runs every pair of the table in docs/parallelism.md; the command `python -m
tests.distributed.test_layouts --update` writes the table from what `Job.check` says."""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Replicate

from tests.support.jobs import write_corpus
from tests.support.layout_runs import STEPS, Runs, job_of, train_on_rank
from tests.support.layouts import AXES, FLOAT8, OPTIONS, TRACED, Part, combined
from tests.support.tiers import sampled
from titanlite.config.component import ConfigError
from titanlite.parallel import tensor_parallel

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- by python -m tests.distributed.test_layouts --update -->", "<!-- end -->"


PIPELINES = {"pp", "pp interleaved", "pp zero bubble"}
PAIRS = [(a, b) for a, b in itertools.combinations(AXES, 2) if not {a, b} <= PIPELINES]
PAIRS += itertools.product(AXES, OPTIONS)


def verdict(folder: Path, corpus: Path, names: tuple[str, ...]) -> str | None:
    """The error of job.check for the combination on GPUs, or None."""
    part = combined(*names)
    keys = [key for key in part.keys if key not in FLOAT8[1:]]
    if len(keys) < len(part.keys):
        keys += ["--compile.enable"]  # float8 needs it unless it is emulated
    try:
        job_of(folder, corpus, Part(part.ranks, keys), "checked")
    except ConfigError as e:
        return str(e).removeprefix("command line, --")
    return None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"), corpus)


LAYOUTS = {
    "tp 2": combined("tp"),
    "tp 2, compile, full activation checkpointing": combined("tp", "compile, full activation checkpointing"),
    "tp 2, float8, offload": combined("tp", "float8 rowwise", "CPU offload"),
    "dp_replicate 2 x dp_shard 2": combined("dp_replicate", "dp_shard"),
    "cp 2 x dp_shard 2, document masks": combined("cp", "dp_shard", "document masks"),
    "tp 2 x dp_shard 2, compile, full activation checkpointing": combined(
        "tp", "dp_shard", "compile, full activation checkpointing"
    ),
    "dp_shard 4": Part(4, ["--training.local_batch_size=1"]),
    "tp 2 x dp_shard 2": combined("tp", "dp_shard"),
    "cp 2": combined("cp"),
    "pp 2, full activation checkpointing": combined("pp", "full activation checkpointing"),
    "pp 2 x dp_shard 2, interleaved": combined("pp interleaved", "dp_shard"),
    "pp 2 x tp 2": combined("pp", "tp"),
    "pp 2 x cp 2": combined("pp", "cp"),
    "pp 2, zero bubble": combined("pp zero bubble"),
    "cp 2 x tp 2 x dp_shard 2": combined("tp", "cp", "dp_shard"),
}


@pytest.mark.parametrize("name", sampled(LAYOUTS, {"tp 2"}))
def test_a_layout_trains_as_one_process(runs: Runs, name: str) -> None:
    runs.assert_equal(name, LAYOUTS[name])


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_a_pair_trains_as_one_process_unless_it_is_refused(runs: Runs, pair: tuple[str, str]) -> None:
    """With the code that torch.compile generates, not only its tracing."""
    if verdict(runs.folder, runs.corpus, pair) is None:
        ranks, keys = combined(*pair)
        runs.assert_equal(" ".join(pair), Part(ranks, [key for key in keys if key != TRACED]))


def train_without_a_sum(*args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "Partial", Replicate)  # the sum of the gradients of hidden states
        train_on_rank(*args)


@pytest.mark.full
def test_control_a_missing_sum_over_ranks_fails(runs: Runs) -> None:
    with pytest.raises(AssertionError) as e:
        runs.assert_equal("broken", combined("tp"), program=train_without_a_sum)
    assert "Traceback" not in str(e.value), "the run itself failed"


def test_one_process_that_offloads_trains_as_one_that_does_not(runs: Runs) -> None:
    """CPU offload in one process uses FSDP over one rank."""
    part = Part(1, OPTIONS["CPU offload"].keys)
    train_on_rank(runs.folder, runs.corpus, part, "offload", STEPS)
    runs.compare("offload", part, STEPS)


def table(cells: dict[tuple[str, str], str | None]) -> str:
    """The pairs as a Markdown table: yes, or the number of the error below the table."""
    reasons = list(dict.fromkeys(reason for reason in cells.values() if reason is not None))
    lines = ["| | " + " | ".join(AXES) + " |", "| --- |" + " --- |" * len(AXES)]
    for row in (*AXES, *OPTIONS):
        cells_of_row = [row]
        for column in AXES:
            pair = (column, row) if (column, row) in cells else (row, column)
            reason = cells.get(pair, "")
            cell = "yes" if reason is None else f"[{reasons.index(reason) + 1}]" if reason else ""
            cells_of_row.append(cell)
        lines.append("| " + " | ".join(cells_of_row) + " |")
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes, ""])


def documented(text: str) -> str:
    """The content of the document with this table."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}"


@pytest.mark.full
def test_the_table_is_what_job_check_says(runs: Runs) -> None:
    said = table({pair: verdict(runs.folder, runs.corpus, pair) for pair in PAIRS})
    assert DOCUMENT.read_text(encoding="utf-8") == documented(said), f"{DOCUMENT.name} is old: --update"


def update() -> None:
    """Write the table. `pytest -m full` runs its pairs."""
    with tempfile.TemporaryDirectory() as name:
        folder, corpus = Path(name), write_corpus(Path(name))
        cells = {pair: verdict(folder, corpus, pair) for pair in PAIRS}
    DOCUMENT.write_text(documented(table(cells)), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python -m tests.distributed.test_layouts --update")
    update()
