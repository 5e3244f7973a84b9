"""The sink wandb: Weights & Biases."""

from __future__ import annotations

import html
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titanlite.files import read_regular
from titanlite.log import logger
from titanlite.metrics.sinks.base import RunInfo
from titanlite.report.trackers.tracker import Client, Numbers, Tracker, TrackerRun

FLUSH_S = 5.0  # for wandb's process to complete the offline files of a run that has just ended
HEADER, BLOCK = 7, 32768  # bytes of a .wandb file


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
            return steps_in_files(self._folder, self._run.id, Path(self._run.dir).parent) if sent else sent
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


def steps_in_files(folder: Path, run_id: str, open_folder: Path) -> set[int]:
    """The steps whose metrics are in the offline files of a run, except the one that is open. wandb buffers
    up to 32 KiB, which a process that is killed does not write."""
    deadline, steps = time.monotonic() + FLUSH_S, set[int]()
    for file in folder.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb"):
        if file.parent.name == open_folder.name:
            continue
        is_whole, in_file = _read(file)
        while not is_whole and time.monotonic() < deadline:
            time.sleep(0.05)
            is_whole, in_file = _read(file)
        steps |= in_file
    return steps


def _read(file: Path) -> tuple[bool, set[int]]:
    """Whether a .wandb file is complete, and the steps whose metrics it has."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    is_whole, steps = False, set[int]()
    for data in records_of(read_regular(file)):
        try:
            record = Record.FromString(data)
        except DecodeError:  # cut short
            break
        values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "train/loss" in values:
            steps.add(int(values["step"]))
        is_whole = is_whole or record.HasField("exit")
    return is_whole, steps


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: after its header, LevelDB's log format."""
    position, record = HEADER, b""
    while position + HEADER <= len(content):
        rest = BLOCK - position % BLOCK
        length, kind = struct.unpack_from("<HB", content, position + 4)  # after a checksum
        if rest < HEADER or kind == 0:  # the block has no more records
            position += rest
            continue
        record += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # a whole record, or the last of its parts
            yield record
            record = b""
