"""The events of a run, from events.jsonl: resumes, rewinds, skipped steps, spikes and saves, as a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.report.charts import short

RESTARTS = ("started", "resumed", "rewound")  # events after which later steps are trained again
VERBS = {
    "resumed": "resumed after step", "rewound": "rewound to step", "skipped": "skipped step",
    "accepted": "accepted an outlier, step", "spike": "spike detected at step",
    "recovered": "recovered from a failure, step", "ended": "ended after step",
}  # fmt: skip
# Fields of an event in words: name, unit of a number. A field without an entry is shown under its own name.
WORDS = {
    "loss": ("loss", "nats"),
    "grad_norm": ("gradient norm", ""),
    "loss_median": ("median loss of the steps before", "nats"),
    "loss_sigmas": ("distance of the loss from it", "standard deviations"),
    "grad_norm_median": ("median gradient norm of the steps before", ""),
    "log_norm_sigmas": ("distance of the norm's logarithm from that of the median", "standard deviations"),
    "start_step": ("began at step", ""),
    "level": ("median loss before it", "nats"),
    "height": ("median loss since is higher by", "nats"),
    "from_step": ("from step", ""),
    "rewinds": ("rewind number", ""),
    "seconds": ("time since the failure", "s"),
}
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
        """The numbers and texts of the event, such as `not finite; loss nan; sequences 48 to 63`."""
        about = {key: value for key, value in self.about.items() if value not in (None, "")}
        if about.get("detected_step") == self.step:
            del about["detected_step"]
        first, last, reason = (about.pop(key, None) for key in ("first_sequence", "last_sequence", "reason"))
        parts = [_text(reason)] if reason else []
        parts += [_in_words(key, value) for key, value in about.items()]
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


def _in_words(key: str, value: Any) -> str:
    """A field of an event, such as `loss 3.2 nats`."""
    name, unit = WORDS.get(key, (key.replace("_", " "), ""))
    return f"{name} {_text(value)} {unit if _is_number(value) else ''}".rstrip()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if not _is_number(value):
        return str(value)[:MAX_CHARACTERS]
    return f"{value:,}" if isinstance(value, int) else short(value)
