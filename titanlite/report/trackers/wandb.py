"""The sink wandb: Weights & Biases."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titanlite.log import logger
from titanlite.metrics.sinks.base import RunInfo
from titanlite.report.trackers.tracker import Client, Numbers, Tracker, TrackerRun


@dataclass(frozen=True, kw_only=True)
class WandB(Tracker, name="wandb"):
    """Weights & Biases. Without an API key (WANDB_API_KEY, or `wandb login`) the run is recorded offline.
    wandb's environment variables hold, too, except for the run's id and folder; WANDB_MODE=disabled records
    nothing."""

    project: str = ""
    """Project; empty: WANDB_PROJECT, else wandb's default."""
    entity: str = ""
    """User or team; empty: WANDB_ENTITY, else the API key's default."""
    group: str = ""
    """Group of runs; empty: WANDB_RUN_GROUP, else none."""
    mode: Literal["", "online", "offline"] = ""
    """offline: record in <dump_folder>/wandb; `titanlite metrics push` with mode = "online" sends it later.
    Empty: WANDB_MODE, else online."""

    def client(self, run: RunInfo) -> Client | None:
        import wandb

        # wandb.login refuses while WANDB_MODE is not online.
        settings = wandb.setup(wandb.Settings(mode="online") if self.mode == "online" else None).settings
        mode = self.mode or {"dryrun": "offline"}.get(settings.mode, settings.mode)
        if mode == "disabled":
            return None
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            logger.warning(
                f"wandb has no API key (WANDB_API_KEY, or `wandb login`): the run is recorded offline in "
                f"{run.folder / 'wandb'}; with a key, `titanlite metrics push {run.folder}` sends it"
            )
        options = {"project": self.project, "entity": self.entity, "group": self.group, "mode": mode}
        client = WandBClient(Path(run.folder), {key: value for key, value in options.items() if value})
        client.run_name = settings.run_name or ""
        return client


class WandBClient(Client):
    """Logs against an additional axis, `step`: wandb drops a record whose wandb step is not the highest."""

    def __init__(self, folder: Path, options: dict[str, Any]):
        self._folder, self._options = folder, options
        self._run: Any = None

    def begin(self, run: TrackerRun) -> str:
        import wandb

        self._run = wandb.init(
            id=run.id,
            name=run.name,
            dir=str(self._folder),
            resume="allow",
            reinit="create_new",  # leaves alone a run that the program itself has opened
            settings=wandb.Settings(console="off", silent=True),
            **self._options,
        )
        self._run.config.update(run.config, allow_val_change=True)
        self._run.define_metric("step", summary="max")
        self._run.define_metric("*", step_metric="step")
        if self._options["mode"] == "offline":
            return "offline"
        logger.info(f"wandb        {self._run.url}")
        return f"{self._run.entity}/{self._run.project}"

    def known_steps(self, sent: set[int]) -> set[int]:
        if self._options["mode"] == "offline":
            return sent  # a kill may have lost the newest ones
        # A process that was killed may have left steps unsent. wandb sends in order.
        summary: Any = self._run.summary.get("step", {}) if self._run.resumed else {}
        return {step for step in sent if step <= summary.get("max", -1)}

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({"step": step, **numbers})

    def sample(self, step: int, index: int, text: str) -> None:
        import wandb

        page = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self._run.log({"step": step, f"samples/{index}": page})

    def end(self, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)
