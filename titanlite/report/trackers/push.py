"""titanlite metrics push RUN [--section.key=value ...] [--allow-imports]

Send the steps and samples of a run folder that an experiment tracker lacks, to each tracker that the run's
job.toml names (`[[metrics.sinks]]` with wandb, mlflow or trackio). Overrides choose another tracker:
--metrics.sinks='[{name = "mlflow", tracking_uri = "http://..."}]'.
It can be repeated: nothing is sent twice. A run that is training is refused, because it sends by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titanlite.checkpoint.lock import FolderLock
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS, error_with_place
from titanlite.config.overrides import split_words
from titanlite.job import Job, load_job
from titanlite.log import printable, tell
from titanlite.metrics.sinks.base import RunInfo
from titanlite.options import take_flag
from titanlite.report.trackers.tracker import Tracker, metrics_of


def main(argv: Sequence[str]) -> int:
    """Run the action `push`. Returns 1 if a tracker did not take everything."""
    action, *rest = argv
    if action != "push":
        raise ConfigError(f"unknown action {action!r}{suggest(action, ['push'])}")
    allow, rest = take_flag(rest, ALLOW_IMPORTS)
    words, overrides = split_words(rest)
    if len(words) != 1:
        raise ConfigError("`titanlite metrics push` takes one run folder; see --help")
    folder = Path(words[0])
    if not (folder / "job.toml").exists():
        raise ConfigError(f"{folder} is not a run folder: it has no job.toml")
    job = load_job(folder / "job.toml", overrides, world_size=None, allow_imports=allow)
    trackers = [sink for sink in job.metrics.sinks if isinstance(sink, Tracker)]
    if not trackers:
        raise ConfigError(
            f"{folder / 'job.toml'} names no tracker; add --metrics.sinks='[{{name = \"wandb\"}}]'",
            "metrics.sinks",
        )
    with FolderLock(folder) as lock:
        lock.take(wait_s=0)
        is_sent = [_push(folder, job, tracker) for tracker in trackers]
        return 0 if all(is_sent) else 1


def _push(folder: Path, job: Job, tracker: Tracker) -> bool:
    """Send what one tracker lacks, and print how much it was. Returns whether the tracker took everything."""
    steps = [step for step, _ in metrics_of(folder)]
    if not steps:
        raise ConfigError(f"{folder / 'metrics.jsonl'} has no steps to send")
    run = RunInfo.identify(folder, toml.as_tree(job), max(steps), job.training.steps)
    open_delivery = tracker.opener(run)
    if open_delivery is None:
        raise ConfigError(f"{tracker.name} is disabled by its environment variables; unset them")
    try:
        delivery = open_delivery()
        delivery.close()
    except Exception as e:  # of any library or network
        tell(f"{tracker.name}: not everything was sent: {error_with_place(e)}")
        return False
    target = printable(delivery.target)
    print(f"{tracker.name} ({target}): {delivery.num_sent} of {len(steps)} logged steps were missing; sent")
    return True
