"""The events of a run, from events.jsonl: resumes, rewinds, skipped steps, spikes and saves, as a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.report.charts import short

RESTARTS = ("started", "resumed", "rewound")  # events after which later steps are trained again
VERBS = {
    "resumed": "resumed after step", "rewound": "rewound to step", "skipped": "skipped step",
    "spike": "spike detected at step",
}  # fmt: skip
NAMES = {"grad_norm": "gradient norm", "rewinds": "rewind number"}
MAX_CHARACTERS = 300  # of one text


@dataclass(frozen=True)
class RunEvent:
    """One event. `about`: its numbers and texts. `is_superseded`: its step was trained again later."""

    step: int
    kind: str
    time: str
    about: dict[str, Any]
    is_superseded: bool

    @property
    def details(self) -> str:
        """The numbers and texts of the event, such as `not finite; loss nan; sequences 48 to 63`."""
        about = {key: value for key, value in self.about.items() if value not in (None, "")}
        first, last, reason = (about.pop(key, None) for key in ("first_sequence", "last_sequence", "reason"))
        parts = [_text(reason)] if reason else []
        parts += [f"{NAMES.get(key, key.replace('_', ' '))} {_text(value)}" for key, value in about.items()]
        parts += [] if first is None or last is None else [f"sequences {_text(first)} to {_text(last)}"]
        return "; ".join(parts)

    @property
    def text(self) -> str:
        """The event in one line, such as `skipped step 7: loss nan; sequences 48 to 63`."""
        text = f"{VERBS.get(self.kind, self.kind)} {self.step:,}"
        return f"{text}: {self.details}" if self.details else text


def events_of(records: Sequence[dict[str, Any]]) -> list[RunEvent]:
    """Return the events of the lines of events.jsonl, in the order in which they happened. Lines without the
    name of an event are left out."""
    events, trained_again_after = list[RunEvent](), float("inf")
    for record in reversed(records):
        about = dict(record)
        step, kind, time = about.pop("step"), about.pop("event", None), about.pop("time", "")
        if not isinstance(kind, str):
            continue
        events.append(RunEvent(step, kind, str(time), about, step > trained_again_after))
        if kind in RESTARTS:
            trained_again_after = min(trained_again_after, step)
    return events[::-1]


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)[:MAX_CHARACTERS]
    return f"{value:,}" if isinstance(value, int) else short(value)
