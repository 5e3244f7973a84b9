"""The output that docs/planning.md quotes: a block `<!-- output: NAME -->` is what `titanlite plan` prints.
The table after `<!-- nodes -->` is computed from the times that the command of the block `failures` prints.

`python -m tests.support.planning_page` writes blocks and table into the page."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlite import cli
from titanlite.lab import goodput
from titanlite.lab.lost_time import Times

PAGE = Path(__file__).resolve().parents[2] / "docs/planning.md"
BLOCK = re.compile(r"(<!-- output: (\w+) -->\n\n```\n).*?(```\n)", re.DOTALL)
COMMANDS = {
    "one": "llama3_1b --gpus 1xRTX4090",
    "eight": "llama3_1b --gpus 8xH100 --price 2.5 --top 3",
    "failures": "llama3_70b --gpus 8000xH100 --parallelism.tensor_parallel_degree=8 "
    "--training.local_batch_size=4 --training.global_batch_size=8000 --mtbf 6334",
}
ONLY_GOODPUT = {"failures"}  # of the plan
TABLE = re.compile(r"(<!-- nodes -->\n).*?(<!-- end of nodes -->)", re.DOTALL)
NODES, RESTARTS_S = (10, 100, 1000), (None, 600.0)  # None: the time of the benchmarks


def refreshed(page: str) -> str:
    """The page with the output of the present program."""
    page = BLOCK.sub(lambda match: f"{match[1]}{_output(match[2])}{match[3]}", page)
    return TABLE.sub(lambda match: f"{match[1]}{_nodes()}\n{match[2]}", page)


@functools.cache
def _output(name: str) -> str:
    command = f"$ titanlite plan {COMMANDS[name]}\n"
    if name in ONLY_GOODPUT:
        return f"{command}...\n{goodput.text(_failures())}\n"
    return command + re.sub(r"^epochs .*\n", "", _printed(name), flags=re.MULTILINE)  # depends on files here


def _printed(name: str, *options: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.run(["plan", *COMMANDS[name].split(), *options]) == 0
    return out.getvalue()


@functools.cache
def _failures() -> dict[str, Any]:
    return dict(json.loads(_printed("failures", "--json"))["goodput"])


def _nodes() -> str:
    """The table of what jobs of several sizes lose."""
    plan = _failures()
    times = Times(**plan["times_s"], sources=plan["sources"])
    head = ["nodes", "a failure every", "restart", "every 250 steps", "at the best interval"]
    causes = ["steps again", "restarts", "saves"]
    rows = [[*head, *causes], ["---"] * (len(head) + len(causes))]
    for nodes in NODES:
        for restart_s in RESTARTS_S:
            mine, mtbf_s = replace(times, restart=restart_s or times.restart), 3600 * 6334 / nodes
            best = goodput.predict(mine, mtbf_s, goodput.best_interval(mine, mtbf_s), 100_000)
            given = goodput.predict(mine, mtbf_s, plan["configured"]["interval"], 100_000)
            cells = [f"{nodes:,}", f"{mtbf_s / 3600:,.3g} h", f"{mine.restart:,.3g} s"]
            cells += [f"{given.share:.2%}", f"{best.share:.2%} (every {best.interval})"]
            lost = [best.shares[cause] for cause in ("steps trained again", "restarts", "saves")]
            rows.append([*cells, *(f"{share:.2%}" for share in lost)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
