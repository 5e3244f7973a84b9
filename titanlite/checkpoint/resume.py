"""The choice of the checkpoint that a run resumes from, and its verification.

Rank 0 chooses and all ranks verify. Nothing is renamed or deleted before it is known that the folder belongs
to this run."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import FileDigest, first_fault, write_file
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.state import TRAIN, read_train
from titanlite.config.component import ConfigError
from titanlite.files import if_on_hub, make_folder, read_regular
from titanlite.log import logger


class Candidate(NamedTuple):
    """A committed checkpoint with a valid manifest. `train`: its train.json."""

    step: int
    path: Path
    train: dict[str, Any]
    manifest_sha256: str


MAX_LISTED = 10  # runs named in one error message
NO_RUN = re.compile(r"\.|(quarantined|archived|step)-")  # folders that are not searched for runs
Fault = tuple[Path, str]  # a committed checkpoint and why it cannot be used


def newest(folder: Path, load_step: int, faults: list[Fault], verify: str) -> Candidate | None:
    """The newest checkpoint that is not damaged, or that of `load_step` unless it is -1. Called on one rank.

    Damaged checkpoints met on the way are added to `faults`. Shards are checked by size; Verification hashes
    them."""
    for step, path in reversed(commit.committed(folder)):
        if load_step not in (-1, step) or path in dict(faults):
            continue
        reason = commit.fault(path, step, sizes=verify != "off") or first_fault(path, small_files(path))
        if not reason:
            try:
                train = read_train(path)
                if train["finite"]:
                    return Candidate(step, path, train, _manifest_sha256(path))
                reason = "its weights or optimizer state are not finite"
            except (FileNotFoundError, ValueError) as e:  # intact, but not written by titanlite
                reason = f"its {TRAIN} cannot be trusted: {e}"
        faults.append((path, reason))
    return None


def newest_healthy(folder: Path) -> int | None:
    """The step of the newest checkpoint that was saved while no steps were being skipped, by train.json
    alone; None if there is no such checkpoint."""
    for step, path in reversed(commit.committed(folder)):
        with suppress(OSError, ValueError):  # a damaged checkpoint is not healthy
            if read_train(path)["healthy"]:
                return step
    return None


def choose(folder: Path, load_step: int, faults: list[Fault], verify: str) -> Candidate | None:
    """The checkpoint that a run resumes from, or None for a new run. Called on rank 0.

    It is the newest one; or that of `load_step`, unless the newest was saved after the run had already gone
    back to that step. Raises CheckpointError if the checkpoint of `load_step` cannot be used."""
    found = newest(folder, -1, faults, verify)
    if load_step == -1:
        return found
    if found is not None and found.train.get("branch") == load_step and found.step > load_step:
        logger.info(f"load_step = {load_step} was already carried out; resuming from step {found.step}")
        return found
    found = newest(folder, load_step, faults, verify)
    if found is None:
        there = ", ".join(str(step) for step, _ in commit.committed(folder)) or "none"
        why = next((f": {why}" for path, why in faults if path.name == f"step-{load_step}"), "")
        archives = [p.parent for p in folder.glob(f"archived-*/step-{load_step}")]
        why = why or (f"; to use it, move it there from {archives[-1]}" if archives else "")
        raise CheckpointError(
            f"--checkpoint.load_step={load_step}: no usable checkpoint of that step in {folder}{why} "
            f"(there: {there})"
        )
    return found


def small_files(path: Path) -> dict[str, FileDigest]:
    """All files of a checkpoint except its shards."""
    files = commit.digests(commit.read_manifest(path))
    return {name: digest for name, digest in files.items() if not name.endswith(commit.SHARD)}


def check_shared(candidate: Candidate, ranks: Ranks) -> None:
    """Raises ConfigError on all ranks if one of them sees another checkpoint than rank 0. Collective."""
    try:
        seen = _manifest_sha256(candidate.path)
    except (OSError, ValueError) as e:
        seen = f"{type(e).__name__}: {e}"
    for rank, answer in enumerate(ranks.gather(seen)):
        if answer != candidate.manifest_sha256:
            raise ConfigError(
                f"rank {rank} does not see the {candidate.path} that rank 0 sees ({answer}): the run folder "
                "must be on storage that all ranks share",
                "job.dump_folder",
            )


class Verification:
    """Hashes the shards of a checkpoint in a thread while they are loaded.

    Each file is hashed by one rank: the rank that wrote it, and so reads it anyway, if the number of ranks is
    the same."""

    def __init__(self, candidate: Candidate, ranks: Ranks):
        self._ranks = ranks
        self._path = candidate.path
        self._thread = ThreadPoolExecutor(1, "verification")
        self._fault = self._thread.submit(self._find)

    def result(self) -> str | None:
        """The first damage that any rank has found, or None. Raises RuntimeError on all ranks if one of them
        could not read the files, which does not mean that they are damaged. Collective."""
        found = error = None
        try:
            found = self._fault.result()
        except Exception as e:  # the other ranks wait for this rank's answer
            error = f"rank {self._ranks.rank} cannot verify {self._path}: {type(e).__name__}: {e}"
        self._thread.shutdown()
        answers = self._ranks.gather((found, error))
        for reason, _ in answers:
            if reason:
                return reason
        for _, error in answers:
            if error:
                raise RuntimeError(error)
        return None

    def _find(self) -> str | None:
        manifest = commit.read_manifest(self._path)
        files = {n: d for n, d in commit.digests(manifest).items() if n.endswith(commit.SHARD)}
        return first_fault(
            self._path, files_to_hash(files, self._ranks.rank, self._ranks.size, manifest["ranks"])
        )


def files_to_hash(files: dict[str, FileDigest], rank: int, size: int, writers: int) -> dict[str, FileDigest]:
    """The shards that `rank` of `size` ranks hashes: its own if the checkpoint had as many `writers`, else
    every size-th file, the largest first."""
    if writers == size:
        wrote = {name: int(m[1]) if (m := re.match(r"__(\d+)_", name)) else 0 for name in files}
        return {name: digest for name, digest in files.items() if wrote[name] % size == rank}
    ordered = sorted(files, key=lambda name: (-files[name].size, name))
    return {name: files[name] for name in ordered[rank::size]}


def probe(folder: Path, ranks: Ranks) -> None:
    """Raises ConfigError unless every rank can write into `folder` and rank 0 sees the files. Collective."""
    place = ranks.agree(lambda: _make_probe(folder))
    try:
        write_file(place / str(ranks.rank), b"")
        problem = None
    except OSError as e:
        problem = f"rank {ranks.rank} cannot write into {folder}: {e}"
    problems = [text for text in ranks.gather(problem) if text]
    if not problems:
        problems = ranks.agree(lambda: _not_seen(place, folder, ranks.size))
    if problems:
        raise ConfigError(
            f"{problems[0]}; the run folder must be on storage that all ranks share and may write to",
            "job.dump_folder",
        )
    ranks.agree(lambda: _remove_probe(place, ranks.size))


def _make_probe(folder: Path) -> Path:
    place = folder / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        make_folder(folder)
        place.mkdir()
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written to: {e}", "job.dump_folder") from None
    return place


def _not_seen(place: Path, folder: Path, size: int) -> list[str]:
    return [
        f"rank 0 does not see files that rank {rank} writes into {folder}"
        for rank in range(size)
        if not (place / str(rank)).exists()
    ]


def _remove_probe(place: Path, size: int) -> None:
    for rank in range(size):
        os.unlink(place / str(rank))
    place.rmdir()


def quarantine_all(faults: list[Fault]) -> None:
    """Rename damaged checkpoints, so that their steps can be saved again."""
    for path, reason in faults:
        logger.warning(f"quarantined a damaged checkpoint as {commit.quarantine(path)}: {reason}")


def unusable(folder: Path, faults: list[Fault]) -> CheckpointError | None:
    """The error for a folder with damaged or quarantined checkpoints and no usable one, or None. A new run
    over them would silently lose the earlier run."""
    remains = [f"{path}: {reason}" for path, reason in faults]
    remains += [f"{path} was quarantined" for path in commit.list_quarantined(folder)]
    if not remains:
        return None
    return CheckpointError(
        f"no usable checkpoint in {folder}: {'; '.join(remains)}; to start at step 1, archive them with "
        "--checkpoint.restart=true, or choose another --job.dump_folder"
    )


def checkpoints_below(path: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints, oldest first, of a path that the user gave: a step folder, a
    checkpoint folder, or a folder that holds one run. Raises ConfigError if it holds no run, or several."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory{if_on_hub(path)}")
    if exported := [p for p in (path, *path.glob("step-*")) if (p / "config.json").exists()]:
        raise ConfigError(f"{exported[-1]} is not a checkpoint but an export of one (config.json)")
    if name := re.fullmatch(r"step-(\d+)", path.name):
        return [(int(name[1]), path)]
    if (path / commit.MANIFEST).exists():  # a copy of a step folder under another name
        try:
            return [(commit.read_manifest(path)["step"], path)]
        except (ValueError, KeyError) as e:
            raise CheckpointError(f"{path} is damaged: its manifest cannot be trusted: {e}") from None
    folders = list(_checkpoint_folders(path))
    if not folders:
        raise ConfigError(f"{path} holds no checkpoint: give a run folder, or one of its step-N folders")
    if len(folders) > 1:
        more = f", ... ({len(folders) - MAX_LISTED} more)" if len(folders) > MAX_LISTED else ""
        listed = ", ".join(map(str, sorted(folders)[:MAX_LISTED])) + more
        raise ConfigError(f"{path} holds the checkpoints of {len(folders)} runs; give one of them: {listed}")
    if found := _saved(folders[0]):
        return found
    bad = commit.list_quarantined(folders[0])
    raise CheckpointError(f"{folders[0]} holds only checkpoints that are quarantined: {bad[-1].name}, ...")


def _checkpoint_folders(path: Path) -> Iterator[Path]:
    """The folders at and below `path` that hold checkpoints of titanlite, usable or quarantined."""
    if _saved(path) or commit.list_quarantined(path):
        yield path
    try:
        below = sorted((e for e in os.scandir(path) if e.is_dir()), key=lambda e: e.name)
    except OSError:  # a folder that this user may not read
        return
    for entry in below:
        if NO_RUN.match(entry.name):
            continue
        if not entry.is_symlink():
            yield from _checkpoint_folders(Path(entry.path))
        elif _saved(Path(entry.path)):  # a checkpoint folder on another disk; no other link is followed
            yield Path(entry.path)


def _saved(folder: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints in a folder, without Hugging Face exports, which have the same names."""
    return [(step, path) for step, path in commit.committed(folder) if not (path / "config.json").exists()]


def find_checkpoint(path: Path) -> Path:
    """The newest of checkpoints_below(). Raises CheckpointError if files of it are missing or too short."""
    newest = checkpoints_below(path)[-1][1]
    if reason := commit.fault(newest):
        raise CheckpointError(f"{newest} is damaged: {reason}")
    return newest


def _manifest_sha256(path: Path) -> str:
    return hashlib.sha256(read_regular(path / commit.MANIFEST)).hexdigest()
