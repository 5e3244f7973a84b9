"""Which checkpoint a run goes on from. Rank 0 chooses, every rank helps to verify, nothing is touched before
it is known that the folder is this run's."""

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
    """A committed checkpoint that looks right. `train`: its train.json. `seal`: SHA-256 of its manifest."""

    step: int
    path: Path
    train: dict[str, Any]
    seal: str


MAX_LISTED = 10  # runs in one message
NO_RUN = re.compile(r"\.|(bad|abandoned|step)-")  # folders in which no run is looked for
Fault = tuple[Path, str]  # a committed checkpoint and why it cannot be used


def newest(folder: Path, load_step: int, faults: list[Fault], verify: str) -> Candidate | None:
    """On one rank: the newest checkpoint, or that of `load_step`, that is not known to be bad. What is found
    to be bad on the way is added to `faults`. The shards' contents are Verification's."""
    for step, path in reversed(commit.committed(folder)):
        if load_step not in (-1, step) or path in dict(faults):
            continue
        reason = commit.fault(path, step, sizes=verify != "off") or first_fault(path, small_files(path))
        if not reason:
            try:
                train = read_train(path)
                if train["finite"]:
                    return Candidate(step, path, train, _seal(path))
                reason = "its weights or moments are not finite"
            except (FileNotFoundError, ValueError) as e:  # as written, but by no run of titanlite's
                reason = f"its {TRAIN} cannot be trusted: {e}"
        faults.append((path, reason))
    return None


def newest_healthy(folder: Path) -> int | None:
    """The step of the newest checkpoint that was saved while no steps were being skipped; None without one.
    Looks at train.json alone."""
    for step, path in reversed(commit.committed(folder)):
        with suppress(OSError, ValueError):  # a damaged one is not it
            if read_train(path)["healthy"]:
                return step
    return None


def choose(folder: Path, load_step: int, faults: list[Fault], verify: str) -> Candidate | None:
    """On rank 0: the checkpoint that a run goes on from, None if there is none: the newest, or that of
    `load_step` unless the newest was saved after the run had gone back to it. Raises CheckpointError if that
    of `load_step` cannot be used."""
    found = newest(folder, -1, faults, verify)
    if load_step == -1:
        return found
    if found is not None and found.train.get("branch") == load_step and found.step > load_step:
        logger.info(f"load_step = {load_step} was carried out before; going on from step {found.step}")
        return found
    found = newest(folder, load_step, faults, verify)
    if found is None:
        there = ", ".join(str(step) for step, _ in commit.committed(folder)) or "none"
        why = next((f": {why}" for path, why in faults if path.name == f"step-{load_step}"), "")
        aside = [p.parent for p in folder.glob(f"abandoned-*/step-{load_step}")]
        why = why or (f"; to have it back, move it there from {aside[-1]}" if aside else "")
        raise CheckpointError(
            f"--checkpoint.load_step={load_step}: no usable checkpoint of that step in {folder}{why} "
            f"(there: {there})"
        )
    return found


def small_files(path: Path) -> dict[str, FileDigest]:
    """All files but the shards."""
    files = commit.digests(commit.read_manifest(path))
    return {name: digest for name, digest in files.items() if not name.endswith(commit.SHARD)}


def check_shared(candidate: Candidate, ranks: Ranks) -> None:
    """Collective: raises ConfigError on all ranks if one of them sees another checkpoint than rank 0."""
    try:
        seen = _seal(candidate.path)
    except (OSError, ValueError) as e:
        seen = f"{type(e).__name__}: {e}"
    for rank, seal in enumerate(ranks.gather(seen)):
        if seal != candidate.seal:
            raise ConfigError(
                f"rank {rank} does not see the {candidate.path} that rank 0 sees ({seal}): the run folder "
                "must be on storage that all ranks share",
                "job.dump_folder",
            )


class Verification:
    """Hashing of the shards, beside their loading. The files are dealt out, so that each is hashed once, by
    the rank that reads it anyway if the ranks are those that wrote it."""

    def __init__(self, candidate: Candidate, ranks: Ranks):
        self._ranks = ranks
        self._path = candidate.path
        self._thread = ThreadPoolExecutor(1, "verification")
        self._fault = self._thread.submit(self._find)

    def result(self) -> str | None:
        """Collective: the first fault that any rank found, or None. Raises RuntimeError on all ranks if one
        could not tell: that is no fault of the checkpoint's."""
        found = error = None
        try:
            found = self._fault.result()
        except Exception as e:  # the others wait for this rank's answer
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
        return first_fault(self._path, share(files, self._ranks.rank, self._ranks.size, manifest["ranks"]))


def share(files: dict[str, FileDigest], rank: int, size: int, writers: int) -> dict[str, FileDigest]:
    """The shards that `rank` of `size` is to hash: its own, if as many ranks wrote them; else every size-th,
    the largest first."""
    if writers == size:
        wrote = {name: int(m[1]) if (m := re.match(r"__(\d+)_", name)) else 0 for name in files}
        return {name: digest for name, digest in files.items() if wrote[name] % size == rank}
    ordered = sorted(files, key=lambda name: (-files[name].size, name))
    return {name: files[name] for name in ordered[rank::size]}


def probe(folder: Path, ranks: Ranks) -> None:
    """Collective: raises ConfigError unless every rank can write into `folder` and rank 0 sees it."""
    place = ranks.agree(lambda: _make_probe(folder))
    try:
        write_file(place / str(ranks.rank), b"")
        said = None
    except OSError as e:
        said = f"rank {ranks.rank} cannot write into {folder}: {e}"
    problems = [text for text in ranks.gather(said) if text]
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
        f"what rank {rank} writes into {folder}, rank 0 does not see"
        for rank in range(size)
        if not (place / str(rank)).exists()
    ]


def _remove_probe(place: Path, size: int) -> None:
    for rank in range(size):
        os.unlink(place / str(rank))
    place.rmdir()


def set_all_aside(faults: list[Fault]) -> None:
    """Move bad checkpoints out of the way, so that their steps can be saved again."""
    for path, reason in faults:
        logger.warning(f"checkpoint set aside as {commit.set_aside(path)}: {reason}")


def unusable(folder: Path, faults: list[Fault]) -> CheckpointError | None:
    """The error for a folder that holds the remains of a run but nothing to go on from: a fresh start over
    them would lose the run in silence."""
    remains = [f"{path}: {reason}" for path, reason in faults]
    remains += [f"{path} was set aside" for path in commit.set_aside_before(folder)]
    if not remains:
        return None
    return CheckpointError(
        f"no usable checkpoint in {folder}: {'; '.join(remains)}; to start afresh, archive them with "
        "--checkpoint.restart=true, or choose another --job.dump_folder"
    )


def checkpoints_below(path: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints that a step folder, a checkpoint folder, or a folder with one run
    stands for, oldest first. Raises ConfigError if there is none, or more than one run."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory{if_on_hub(path)}")
    if exported := [p for p in (path, *path.glob("step-*")) if (p / "config.json").exists()]:
        raise ConfigError(f"{exported[-1]} is no checkpoint but an export of one (config.json)")
    if name := re.fullmatch(r"step-(\d+)", path.name):
        return [(int(name[1]), path)]
    if (path / commit.MANIFEST).exists():  # a copy of one under another name
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
    bad = commit.set_aside_before(folders[0])
    raise CheckpointError(f"{folders[0]} holds only checkpoints that are quarantined: {bad[-1].name}, ...")


def _checkpoint_folders(path: Path) -> Iterator[Path]:
    """The folders at and below `path` with checkpoints of titanlite's, good or quarantined."""
    if _saved(path) or commit.set_aside_before(path):
        yield path
    try:
        below = sorted((e for e in os.scandir(path) if e.is_dir()), key=lambda e: e.name)
    except OSError:  # not ours to read
        return
    for entry in below:
        if NO_RUN.match(entry.name):
            continue
        if not entry.is_symlink():
            yield from _checkpoint_folders(Path(entry.path))
        elif _saved(Path(entry.path)):  # a checkpoint folder on another disk; no other link is followed
            yield Path(entry.path)


def _saved(folder: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints in a folder; Hugging Face's exports have the same names."""
    return [(step, path) for step, path in commit.committed(folder) if not (path / "config.json").exists()]


def find_checkpoint(path: Path) -> Path:
    """The newest of checkpoints_below(). Raises CheckpointError if it is not whole."""
    newest = checkpoints_below(path)[-1][1]
    if reason := commit.fault(newest):
        raise CheckpointError(f"{newest} is not whole: {reason}")
    return newest


def _seal(path: Path) -> str:
    return hashlib.sha256(read_regular(path / commit.MANIFEST)).hexdigest()
