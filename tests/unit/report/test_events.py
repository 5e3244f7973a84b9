"""The fields of events are shown in words, and docs/report.md has all of them."""

from __future__ import annotations

from dataclasses import asdict

from tests.support.jobs import ROOT
from titanlite.metrics.decisions import Decision
from titanlite.metrics.outliers import Evidence
from titanlite.metrics.silent_faults import Fault
from titanlite.metrics.spikes import Spike
from titanlite.report.events import WORDS, events_of

OUTLIER = Decision(7, 96, 111, True, False, 0, 12.0, 3.5, Evidence(1.0, 0.0, 9.0, 0.0, -3.37, 4.34))
SPIKE = Spike(251, 274, 2.45, 25.6)
SPECIAL = {"reason", "first_sequence", "last_sequence", "detected_step"}  # in the sentence without a name


def test_an_outlier_and_a_spike_in_words() -> None:
    skipped = {"step": 7, "event": "skipped", **OUTLIER.about()}
    spike = {"step": 274, "event": "spike", **asdict(SPIKE), "first_sequence": 16, "last_sequence": 31}
    assert [event.text for event in events_of([skipped, spike])] == [
        "skipped step 7: outlier; loss 12 nats; gradient norm 3.5; median loss of the steps before 9 nats; "
        "distance of the loss from it -3.37 standard deviations; "
        "median gradient norm of the steps before 1; "
        "distance of the norm's logarithm from that of the median 4.34 standard deviations; "
        "sequences 96 to 111",
        "spike detected at step 274: began at step 251; median loss before it 2.45 nats; "
        "median loss since is higher by 25.6 nats; sequences 16 to 31",
    ]
    (event,) = events_of([{"step": 7, "event": "skipped", "loss": "nan", "new_field": True}])
    assert event.details == "loss nan; new field True"


def test_every_field_has_words_and_a_place_in_the_docs() -> None:
    fields = {*OUTLIER.about(), *asdict(SPIKE), *Fault(8, 4, []).about()}
    assert fields <= {*WORDS, *SPECIAL}
    docs = (ROOT / "docs/report.md").read_text(encoding="utf-8")
    section = docs[docs.index("## Events") : docs.index("## Verdicts")]
    assert [field for field in {*WORDS, *SPECIAL} if f"`{field}`" not in section] == []
