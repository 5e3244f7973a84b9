"""The verbs `compare`, `report` and `metrics` of the command line. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titanlite.commands import Verb
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_words
from titanlite.object_store import location
from titanlite.options import Options, number_of, take_flag


def add_compare(options: Options) -> None:
    options.add("runs", type=location, nargs="+", metavar="RUN", help="a run folder, which has metrics.jsonl")
    options.add(
        "--price-per-gpu-hour",
        type=number_of("price such as 2.50", may_be_zero=True),
        metavar="PRICE",
        help="adds what the GPU hours of each run cost",
    )


def add_report(options: Options) -> None:
    add_compare(options)
    options.add(
        "-o", "--output", type=Path, default=Path("report.html"), help="the file to write (report.html)"
    )


def _metrics_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    words, overrides = split_words(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    return (str(Path(words[0]) / "job.toml"), overrides) if argv[0] == "push" and words else None


VERBS = {
    "compare": Verb("titanlite.report.compare", "compare runs on the terminal", options=add_compare),
    "report": Verb("titanlite.report.page", "write an HTML report on runs", options=add_report),
    "metrics": Verb(
        "titanlite.report.trackers.push",
        "send the metrics of a run to experiment trackers",
        table="job",
        config_of=_metrics_config,
        own=(ALLOW_IMPORTS,),
    ),
}
