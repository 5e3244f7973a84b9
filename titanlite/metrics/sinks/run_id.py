"""The id of a run for metric sinks. A resume and a move of the run folder keep it; a copy of the folder is
another run."""

from __future__ import annotations

import json
import uuid
from pathlib import PurePath
from typing import NamedTuple

from titanlite.config import json_file
from titanlite.log import logger
from titanlite.storage import parse_path, storage_of

NAME = "run_id.json"


class RunId(NamedTuple):
    """The id of a run, and the folder that it was recorded in. `copied_from`: the id of the run whose folder
    was copied, or empty; `copied_at_step`: the step after which the copy first continued."""

    run_id: str
    folder: str
    device: int
    inode: int
    copied_from: str = ""
    copied_at_step: int = 0


def identify(folder: PurePath, resumed_step: int) -> RunId:
    """The id of the run in a folder, which is recorded there. It is made when a run starts at its first step
    (`resumed_step` is 0), for a copy of another run's folder, and if it cannot be read."""
    storage = storage_of(folder)
    recorded = _read(folder) if resumed_step else None
    here = RunId(uuid.uuid4().hex, *storage.folder_id(folder))
    if recorded is not None and _is_copy(recorded, here):
        here = here._replace(copied_from=recorded.run_id, copied_at_step=resumed_step)
        logger.info(
            f"{folder} is a copy of {recorded.folder}: for trackers it is a run of its own, {here.run_id}, "
            f"branched after step {resumed_step}"
        )
    elif recorded is not None:
        here = recorded._replace(folder=here.folder, device=here.device, inode=here.inode)
    if here != recorded:
        storage.put(folder / NAME, json_file.as_json(here._asdict()))
    return here


def _is_copy(recorded: RunId, here: RunId) -> bool:
    """Whether the folder is a copy of the one that the id was recorded in. A move keeps the inode, unless it
    leads to another file system, and then nothing remains at the old path."""
    if recorded.folder == here.folder or recorded[2:4] == here[2:4]:
        return False
    original = _read(parse_path(recorded.folder))
    return recorded.device == here.device or (original is not None and original.run_id == recorded.run_id)


def _read(folder: PurePath) -> RunId | None:
    """The id that is recorded in a folder; None if it cannot be read."""
    try:
        return RunId(**json.loads(storage_of(folder).read(folder / NAME)))
    except (OSError, ValueError, TypeError):
        return None
