"""The choice of the checkpoint that a run resumes from, and its verification.

Rank 0 chooses and all ranks verify. Nothing is renamed or deleted until the folder is known to belong to this
run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import SHARD_SUFFIX, CheckpointError
from titanlite.checkpoint.digest import FileDigest, first_fault, write_file
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.state import AVERAGED_FROM, TRAIN, listed, read_train
from titanlite.config.component import ConfigError
from titanlite.config.paths import check_folder
from titanlite.files import is_file_error, make_folder, read_regular
from titanlite.log import logger


class Candidate(NamedTuple):
    """A committed checkpoint with a valid manifest. `train`: its train.json."""

    step: int
    path: Path
    train: dict[str, Any]
    manifest_sha256: str


MAX_LISTED = 10  # runs named in one error message
NO_RUN = re.compile(r"\.|(quarantined|archived|step)-")  # folders that are not searched for runs
Fault = tuple[Path, str]  # a committed checkpoint, and the reason why it cannot be used


def newest(folder: Path, load_step: int, faults: list[Fault]) -> Candidate | None:
    """The newest checkpoint that is not damaged; if `load_step` is not -1, only that step is considered.
    Called on one rank.

    Adds the damaged checkpoints that were tried to `faults`. Checks only the sizes of shards; Verification
    hashes them. Raises ConfigError for an average of checkpoints, from which no run can resume."""
    for step, path in reversed(commit.list_committed(folder)):
        if load_step not in (-1, step) or path in dict(faults):
            continue
        reason = commit.fault(path, step) or first_fault(path, small_files(path))
        if not reason:
            try:
                candidate = Candidate(step, path, read_train(path), _manifest_sha256(path))
            except (FileNotFoundError, ValueError) as e:  # its hashes are right, but no run has written it
                reason = f"its {TRAIN} cannot be trusted: {e}"
            else:
                _check_is_of_a_run(candidate)
                if candidate.train["finite"]:
                    return candidate
                reason = "its weights or optimizer state are not finite"
        faults.append((path, reason))
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


def healthy_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints whose train.json says that training was healthy when they were saved: no
    steps were being skipped, and the loss was not in a spike. In ascending order."""
    steps = []
    for step, path in commit.list_committed(folder):
        with suppress(OSError, ValueError):  # a damaged checkpoint is not healthy
            if read_train(path)["healthy"]:
                steps.append(step)
    return steps


def newest_healthy(folder: Path, before: int | None = None) -> int | None:
    """The newest of healthy_steps(), or of those before step `before`; None if there is none."""
    steps = healthy_steps(folder)
    return max((step for step in steps if before is None or step < before), default=None)


def choose(folder: Path, load_step: int, faults: list[Fault]) -> Candidate | None:
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
    archives = [path.parent for path in folder.glob(f"archived-*/step-{load_step}")]
    if archives and not detail:
        detail = f"; to use it, move it there from {archives[-1]}"
    steps = ", ".join(str(step) for step, _ in commit.list_committed(folder)) or "none"
    raise CheckpointError(
        f"--checkpoint.load_step={load_step}: no usable checkpoint of that step in {folder}{detail} "
        f"(steps in the folder: {steps})"
    )


def small_files(path: Path) -> dict[str, FileDigest]:
    """The digests of all files of a checkpoint except its shards."""
    files = commit.digests(commit.read_manifest(path))
    return {name: digest for name, digest in files.items() if not name.endswith(SHARD_SUFFIX)}


def check_shared(candidate: Candidate, ranks: Ranks) -> None:
    """Raises ConfigError on all ranks unless every rank sees the checkpoint that rank 0 sees. Collective."""
    try:
        manifest_sha256 = _manifest_sha256(candidate.path)
    except (OSError, ValueError) as e:
        manifest_sha256 = f"{type(e).__name__}: {e}"
    differs = manifest_sha256 != candidate.manifest_sha256
    if other := ranks.first((ranks.rank, manifest_sha256) if differs else None):
        rank, seen = other
        raise ConfigError(
            f"rank {rank} does not see the {candidate.path} that rank 0 sees ({seen}): the run folder must "
            "be on storage that all ranks share",
            "job.dump_folder",
        )


class Verification:
    """Hashes the shards of a checkpoint in a thread while they are loaded.

    Each file is hashed by one rank. If the number of ranks is that of the save, a rank hashes the files that
    it wrote, because it reads those anyway."""

    def __init__(self, candidate: Candidate, ranks: Ranks):
        self._ranks = ranks
        self._path = candidate.path
        self._thread = ThreadPoolExecutor(1, "verification")
        self._fault = self._thread.submit(self._first_fault)

    def result(self) -> str | None:
        """The first damage that any rank has found, or None. Raises an OSError or a RuntimeError on all ranks
        if a rank could not read its files; that does not mean that they are damaged. Collective."""
        fault, error = None, self._fault.exception()
        if error is None:
            fault = self._fault.result()
        elif not is_file_error(error):
            error = RuntimeError(f"rank {self._ranks.rank} cannot verify {self._path}: {error!r}")
        self._thread.shutdown()
        fault, error = self._ranks.first(fault), self._ranks.first(error)
        if error is not None and fault is None:
            raise error
        return fault

    def _first_fault(self) -> str | None:
        manifest = commit.read_manifest(self._path)
        files = {name: d for name, d in commit.digests(manifest).items() if name.endswith(SHARD_SUFFIX)}
        ranks = self._ranks
        return first_fault(self._path, files_to_hash(files, ranks.rank, ranks.size, manifest["ranks"]))


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


def check_storage(folder: Path, ranks: Ranks) -> None:
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
    ranks.from_rank_zero(lambda: shutil.rmtree(probe))


def _first_unseen(probe: Path, num_ranks: int) -> int | None:
    """The lowest rank whose file is not there."""
    seen = {file.name for file in probe.iterdir()}
    return next((rank for rank in range(num_ranks) if str(rank) not in seen), None)


def _make_probe(folder: Path) -> Path:
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        make_folder(folder)
        probe.mkdir()
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written to: {e}", "job.dump_folder") from None
    return probe


def quarantine_all(faults: list[Fault]) -> None:
    """Rename damaged checkpoints, so that their steps can be saved again."""
    for path, reason in faults:
        logger.warning(f"quarantined a damaged checkpoint as {commit.quarantine(path)}: {reason}")


def unusable(folder: Path, faults: list[Fault]) -> CheckpointError | None:
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


def checkpoints_below(path: Path) -> list[tuple[int, Path]]:
    """(step, path) of the checkpoints at a path that the user gave, oldest first. `path`: a step folder, a
    checkpoint folder, or a folder with one run below it. Raises ConfigError if there is no run, or several.
    """
    check_folder(path)
    if exported := [p for p in (path, *path.glob("step-*")) if (p / "config.json").exists()]:
        raise ConfigError(f"{exported[-1]} is not a checkpoint but an export of one (config.json)")
    if (step := commit.step_of(path)) is not None:
        return [(step, path)]
    if (path / commit.MANIFEST).exists():  # a copy of a step folder under another name
        try:
            return [(commit.read_manifest(path)["step"], path)]
        except (ValueError, KeyError) as e:
            raise CheckpointError(f"{path} is damaged: its manifest cannot be trusted: {e}") from None
    folders = list(_checkpoint_folders(path))
    if not folders:
        raise ConfigError(f"{path} holds no checkpoint: give a run folder, or one of its step-N folders")
    if len(folders) > 1:
        runs = listed(sorted(map(str, folders)), MAX_LISTED)
        raise ConfigError(f"{path} holds the checkpoints of {len(folders)} runs; give one of them: {runs}")
    if checkpoints := _saved(folders[0]):
        return checkpoints
    quarantined = commit.list_quarantined(folders[0])
    raise CheckpointError(f"{folders[0]} has only quarantined checkpoints: {quarantined[-1].name}, ...")


def _checkpoint_folders(path: Path) -> Iterator[Path]:
    """The folders at and below `path` that hold titanlite checkpoints, usable or quarantined."""
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
        elif _saved(Path(entry.path)):  # a checkpoint folder on another disk; other links are not followed
            yield Path(entry.path)


def _saved(folder: Path) -> list[tuple[int, Path]]:
    """The committed checkpoints in a folder, without Hugging Face exports, which have the same names."""
    checkpoints = commit.list_committed(folder)
    return [(step, path) for step, path in checkpoints if not (path / "config.json").exists()]


def find_checkpoint(path: Path) -> Path:
    """The newest checkpoint at a path that the user gave; see checkpoints_below(). Raises CheckpointError if
    files of that checkpoint are missing or have another size."""
    _, checkpoint = checkpoints_below(path)[-1]
    if reason := commit.fault(checkpoint):
        raise CheckpointError(f"{checkpoint} is damaged: {reason}")
    return checkpoint


def _manifest_sha256(path: Path) -> str:
    return hashlib.sha256(read_regular(path / commit.MANIFEST)).hexdigest()
