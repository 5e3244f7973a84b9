"""The events of a run, from events.jsonl: resumes, rewinds, skipped steps, spikes and saves, as a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RESTARTS = ("started", "resumed", "rewound")  # events after which later steps are trained again
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
    def start_step(self) -> int:
        """The step at which a spike began; the step of the event if it does not say that."""
        start = self.about.get("start_step")
        return start if type(start) is int and 0 <= start <= self.step else self.step

    @property
    def details(self) -> str:
        """The sentence that the run logged, or else the fields, such as `changed ranks 1 -> 2`."""
        fields = "; ".join(f"{key} {value}" for key, value in self.about.items())
        return str(self.about.get("text", fields))[:MAX_CHARACTERS]

    @property
    def text(self) -> str:
        """The event in one line: the sentence that the run logged, or the kind, the step and the fields."""
        head = "" if "text" in self.about else f"{self.kind}, step {self.step:,}"
        return ": ".join(filter(None, [head, self.details]))


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
