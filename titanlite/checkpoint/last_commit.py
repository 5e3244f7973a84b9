"""`last_commit.json` in the run folder records the newest checkpoint that the run has committed.

It lies outside the checkpoint folder. The checkpoint folder may be missing because its disk is not mounted or
`checkpoint.folder` was changed; without this record, such a run would start again at step 1."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import NamedTuple

from titanlite.checkpoint.commit import CheckpointError
from titanlite.storage import storage_of

NAME = "last_commit.json"


class LastCommit(NamedTuple):
    """Content of last_commit.json. `step`: step of the newest checkpoint, None before the first commit.
    `folder`: checkpoint.folder at that time. `restarted`: whether checkpoint.restart was set at the last
    start and has been carried out. `load_step`: checkpoint.load_step of the last start. `history`: a random
    name, which changes when the run goes back to an earlier step: copies in memory of another history are not
    used."""

    step: int | None = None
    folder: str = ""
    restarted: bool = False
    load_step: int = -1
    history: str = ""


def read(run_folder: PurePath) -> LastCommit | None:
    """The record of a run folder, or None if there is none. Raises CheckpointError if it is damaged."""
    file = run_folder / NAME
    try:
        return LastCommit(**json.loads(storage_of(file).read(file)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as e:
        raise CheckpointError(
            f"{file} cannot be read ({e}): if this run has saved no checkpoint, delete that file; "
            "otherwise put the checkpoints back"
        ) from None


def write(run_folder: PurePath, record: LastCommit) -> None:
    """Replace the record of a run folder, on rank 0, which holds the folder's lock."""
    storage = storage_of(run_folder)
    storage.put(run_folder / NAME, f"{json.dumps(record._asdict())}\n".encode())
    storage.sync(run_folder)
