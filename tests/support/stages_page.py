"""The output that docs/stages.md quotes: a block `<!-- output: NAME -->` is what titanlite prints for the
example on the page, with made-up text as its data.

`python -m tests.support.stages_page` writes the blocks into the page."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import tempfile
from pathlib import Path

from titanlite import start, start_log
from titanlite.checkpoint.run_identity import check_identity
from titanlite.config.component import ConfigError
from titanlite.corpus import plan_data
from titanlite.job import Job, load_job
from titanlite.stages import Stages

PAGE = Path(__file__).resolve().parents[2] / "docs/stages.md"
BLOCK = re.compile(r"(<!-- output: (\w+) -->\n\n```\n).*?(```\n)", re.DOTALL)
FILES = {"data/web.txt": 600_000, "data/code.txt": 150_000}  # bytes


def refreshed(page: str) -> str:
    """The page with the output of the present program."""
    (example,) = re.findall(r'```toml title="train.toml"\n(.*?)```', page, re.DOTALL)
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            outputs = _outputs(example)
        finally:
            os.chdir(here)
    return BLOCK.sub(lambda match: f"{match[1]}{outputs[match[2]]}\n{match[3]}", page)


def _outputs(example: str) -> dict[str, str]:
    """The output by name. Runs in an empty folder."""
    os.mkdir("data")
    for path, size in FILES.items():
        rng = random.Random(path)
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(500)]
        text = " ".join(rng.choices(words, k=size // 3))
        Path(path).write_text(text[:size], encoding="utf-8")
    Path("train.toml").write_text(example, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as plan, contextlib.redirect_stderr(io.StringIO()):
        plan_data.main(["train.toml"])
        job, stages, identity, log = _opened(load_job("train.toml"))
        position = stages.step_sizes.position_after(300)
        changed = _opened(load_job("train.toml", ["--stages.0.until=100K tokens"]))[2]
    try:
        check_identity(identity, changed, [], job.folder, position)
    except ConfigError as e:
        return {"plan": plan.getvalue().strip(), "log": "\n".join(log), "refusal": f"{e.key}: {e}"}
    raise AssertionError("the change was accepted")


def _opened(job: Job) -> tuple[Job, Stages, dict[str, object], list[str]]:
    """The job, its stages, its run identity, and the lines of its log about its data."""
    sequences = job.data.build(job.tokenizer.build(), seq_len=job.training.seq_len, seed=job.training.seed)
    given = job
    job, stages = start.open_stages(given, 1, sequences)
    about = start_log.about_steps(given, job)
    lines = [line for line in about if "tokens" in line] + start.check_data(job, stages, sequences, None)
    return job, stages, job.identity(sequences.identity, sequences.names), lines


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
