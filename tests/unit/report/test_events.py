"""An event in one line, and docs/report.md has all fields of events."""

from __future__ import annotations

from dataclasses import asdict

from tests.support.jobs import ROOT
from titanlite.metrics.decisions import Decision
from titanlite.metrics.outliers import Evidence
from titanlite.metrics.silent_faults import Fault
from titanlite.metrics.spikes import Spike
from titanlite.report.events import events_of

OUTLIER = Decision(7, 96, 111, True, False, 0, 12.0, 3.5, Evidence(1.0, 0.0, 9.0, 0.0, -3.37, 4.34))


def test_an_event_in_one_line() -> None:
    skipped = {"step": 7, "event": "skipped", "loss": "nan", "text": "step 7 is skipped: loss nan"}
    resumed = {"step": 1200, "event": "resumed", "changed": "optimizer.lr 0.2 -> 0.1"}
    assert [event.text for event in events_of([skipped, resumed, {"step": 7, "event": "saved"}])] == [
        "step 7 is skipped: loss nan",
        "resumed, step 1,200: changed optimizer.lr 0.2 -> 0.1",
        "saved, step 7",
    ]


def test_the_docs_have_every_field() -> None:
    fields = {*OUTLIER.about(), *asdict(Spike(251, 274, 2.45, 25.6)), *Fault(8, 4, []).about()}
    docs = (ROOT / "docs/report.md").read_text(encoding="utf-8")
    section = docs[docs.index("## Events") : docs.index("## Verdicts")]
    assert [field for field in fields if f"`{field}`" not in section] == []
