"""The choice of the checkpoint that a run resumes from, and its verification.

Rank 0 chooses and all ranks verify. Nothing is renamed or deleted until the folder is known to belong to this
run."""

from __future__ import annotations

import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Any, NamedTuple

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import SHARD_SUFFIX, CheckpointError, Manifest
from titanlite.checkpoint.digest import FileDigest, first_fault, write_file
from titanlite.checkpoint.state import AVERAGED_FROM, TRAIN, read_train
from titanlite.config.component import ConfigError
from titanlite.files import is_file_error
from titanlite.log import logger
from titanlite.ranks import Ranks
from titanlite.storage import storage_of


class Candidate(NamedTuple):
    """A committed checkpoint whose manifest, train.json and job.toml are as they were written. `in_memory`:
    whether it is a copy in the memory of the nodes, all of whose bytes are as they were written."""

    step: int
    path: PurePath
    manifest: Manifest
    train: dict[str, Any]
    job_toml: str
    in_memory: bool = False


Fault = tuple[PurePath, str]  # a committed checkpoint, and the reason why it cannot be used


def newest(folder: PurePath, load_step: int, faults: list[Fault]) -> Candidate | None:
    """The newest checkpoint that is not damaged; if `load_step` is not -1, only that step is considered.
    Called on one rank.

    Adds the damaged checkpoints that were tried to `faults`. Checks only the sizes of shards; Verification
    hashes them. Raises ConfigError for an average of checkpoints, from which no run can resume."""
    for step, path in reversed(commit.list_committed(folder)):
        if load_step not in (-1, step) or path in dict(faults):
            continue
        try:
            manifest = commit.check(path, step)
            train = json.loads(commit.read_file(path, TRAIN, manifest))
            job_toml = commit.read_file(path, "job.toml", manifest).decode()
        except commit.Damaged as e:
            faults.append((path, str(e)))
            continue
        candidate = Candidate(step, path, manifest, train, job_toml)
        _check_is_of_a_run(candidate)
        if train["finite"]:
            return candidate
        faults.append((path, "its weights or optimizer state are not finite"))
    return None


def _check_is_of_a_run(candidate: Candidate) -> None:
    """Raises ConfigError for an average of checkpoints. It is not damaged, so it is not quarantined."""
    if AVERAGED_FROM in candidate.train:
        raise ConfigError(
            f"{candidate.path} is an average of checkpoints, without optimizer state: no run can resume from "
            f"it. Move it out of {candidate.path.parent}, and start a new run from it with "
            "--checkpoint.initial_load_path",
            "job.dump_folder",
        )


def is_healthy(path: PurePath) -> bool:
    """Whether the train.json of a checkpoint says that training was healthy when it was saved: no steps were
    being skipped, and the loss was not in a spike. A damaged checkpoint is not healthy. Raises OSError if a
    file system does not answer now."""
    try:
        return read_train(path)["healthy"]
    except (FileNotFoundError, ValueError, KeyError):
        return False


def choose(folder: PurePath, load_step: int, faults: list[Fault]) -> Candidate | None:
    """The checkpoint that a run resumes from, or None for a new run. Called on rank 0.

    It is the newest checkpoint, or with `load_step` the checkpoint of that step, unless the newest was saved
    after the run had already gone back to that step. Raises CheckpointError if the checkpoint of `load_step`
    cannot be used."""
    candidate = newest(folder, -1, faults)
    if load_step == -1:
        return candidate
    has_gone_back = candidate is not None and candidate.train.get("branch") == load_step
    if candidate is not None and has_gone_back and candidate.step > load_step:
        logger.info(f"load_step = {load_step} was already carried out; resuming from step {candidate.step}")
        return candidate
    if candidate := newest(folder, load_step, faults):
        return candidate
    detail = next((f": {reason}" for path, reason in faults if path.name == f"step-{load_step}"), "")
    storage = storage_of(folder)
    archives = sorted(storage.list(folder, "archived-*"))
    archives = [path for path in archives if storage.exists(path / f"step-{load_step}")]
    if archives and not detail:
        detail = f"; to use it, move it there from {archives[-1]}"
    steps = ", ".join(str(step) for step, _ in commit.list_committed(folder)) or "none"
    raise CheckpointError(
        f"--checkpoint.load_step={load_step}: no usable checkpoint of that step in {folder}{detail} "
        f"(steps in the folder: {steps})"
    )


def check_shared(candidate: Candidate, ranks: Ranks) -> None:
    """Raises ConfigError on all ranks unless every rank sees the checkpoint that rank 0 sees. Collective."""
    seen = candidate.manifest["sha256"]
    if ranks.rank > 0:
        try:
            seen = commit.read_manifest(candidate.path)["sha256"]
        except (OSError, CheckpointError) as e:
            seen = f"{type(e).__name__}: {e}"
    differs = seen != candidate.manifest["sha256"]
    if other := ranks.first((ranks.rank, seen) if differs else None):
        rank, seen = other
        raise ConfigError(
            f"rank {rank} does not see the {candidate.path} that rank 0 sees ({seen}): the run folder must "
            "be on storage that all ranks share",
            "job.dump_folder",
        )


class Verification:
    """Hashes the shards of a checkpoint in a thread while they are loaded.

    Each file is hashed by one rank. If as many ranks load as have saved, a rank hashes the files that
    it wrote, because it reads those anyway."""

    def __init__(self, path: PurePath, manifest: Manifest, ranks: Ranks):
        self._path, self._manifest, self._ranks = path, manifest, ranks
        self._thread = ThreadPoolExecutor(1, "verification")
        self._fault = self._thread.submit(self._first_fault)

    def result(self) -> str | None:
        """The first damage that any rank has found, or None. Raises an OSError or a RuntimeError on all ranks
        if a rank could not read its files; that does not mean that they are damaged. Collective."""
        fault, error = None, self._fault.exception()
        if error is None:
            fault = self._fault.result()
        self._thread.shutdown()
        return tell_all(fault, error, self._path, self._ranks)

    def _first_fault(self) -> str | None:
        ranks, manifest = self._ranks, self._manifest
        files = {name: d for name, d in commit.digests(manifest).items() if name.endswith(SHARD_SUFFIX)}
        return first_fault(self._path, files_to_hash(files, ranks.rank, ranks.size, manifest["ranks"]))


def tell_all(fault: str | None, error: BaseException | None, path: PurePath, ranks: Ranks) -> str | None:
    """The first damage of the checkpoint at `path` that any rank has found, or None. Raises the first error
    of reading on all ranks unless one has found damage. Collective."""
    if error is not None and not is_file_error(error):
        error = RuntimeError(f"rank {ranks.rank} cannot verify {path}: {error!r}")
    fault, error = ranks.first(fault), ranks.first(error)
    if error is not None and fault is None:
        raise error
    return fault


def files_to_hash(
    files: dict[str, FileDigest], rank: int, size: int, num_writers: int
) -> dict[str, FileDigest]:
    """The shards that `rank` of `size` ranks hashes: the shards that it wrote if the checkpoint has as many
    writers, else every size-th file in the order of sizes."""
    if num_writers == size:
        writers = {name: int(m[1]) if (m := re.match(r"__(\d+)_", name)) else 0 for name in files}
        return {name: digest for name, digest in files.items() if writers[name] % size == rank}
    ordered = sorted(files, key=lambda name: (-files[name].size, name))
    return {name: files[name] for name in ordered[rank::size]}


def check_storage(folder: PurePath, ranks: Ranks) -> None:
    """Raises ConfigError unless every rank can write into `folder` and rank 0 sees the files. Collective."""
    probe = ranks.from_rank_zero(lambda: _make_probe(folder))
    problem = None
    try:
        write_file(probe / str(ranks.rank), b"")
    except OSError as e:
        problem = f"rank {ranks.rank} cannot write into {folder}: {e}"
    problem = ranks.first(problem)
    unseen = ranks.from_rank_zero(lambda: _first_unseen(probe, ranks.size))
    if problem is None and unseen is not None:
        problem = f"rank 0 does not see files that rank {unseen} writes into {folder}"
    if problem is not None:
        raise ConfigError(
            f"{problem}; the run folder must be on storage that all ranks share and may write to",
            "job.dump_folder",
        )
    ranks.from_rank_zero(lambda: storage_of(probe).delete(probe))


def _first_unseen(probe: PurePath, num_ranks: int) -> int | None:
    """The lowest rank whose file is not there."""
    seen = {file.name for file in storage_of(probe).list(probe)}
    return next((rank for rank in range(num_ranks) if str(rank) not in seen), None)


def _make_probe(folder: PurePath) -> PurePath:
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        storage_of(probe).make_folder(probe)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written to: {e}", "job.dump_folder") from None
    return probe


def quarantine_all(faults: list[Fault]) -> None:
    """Rename damaged checkpoints, so that their steps can be saved again."""
    for path, reason in faults:
        logger.warning(f"quarantined a damaged checkpoint as {commit.quarantine(path)}: {reason}")


def unusable(folder: PurePath, faults: list[Fault]) -> CheckpointError | None:
    """The error for a folder whose checkpoints are all damaged or quarantined; None for a folder without
    checkpoints. A new run in such a folder would silently lose the earlier run."""
    reasons = [f"{path}: {reason}" for path, reason in faults]
    reasons += [f"{path} was quarantined" for path in commit.list_quarantined(folder)]
    if not reasons:
        return None
    return CheckpointError(
        f"no usable checkpoint in {folder}: {'; '.join(reasons)}; to start at step 1, archive them with "
        "--checkpoint.restart=true, or choose another --job.dump_folder"
    )
