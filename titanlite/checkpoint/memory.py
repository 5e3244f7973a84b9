"""Copies of the newest state in the memory of the nodes, from which a run resumes after a failure.

A copy is a checkpoint in the ordinary format. Each node has a folder of shared memory, which outlives the
ranks. `step-N` in it holds the shards of the ranks of this node and of the node before it, so that the copy
survives the loss of a node, and the small files of the whole checkpoint. The next copy is written beside it,
and replaces it when it is complete on all nodes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import MANIFEST, SHARD_SUFFIX, CheckpointError, Damaged, Manifest
from titanlite.checkpoint.digest import THREADS, FileDigest, digest_file, fault_of, gib
from titanlite.checkpoint.file_system import HashingFileSystem
from titanlite.checkpoint.resume import Candidate
from titanlite.checkpoint.save_plan import SavePlans, WriteReport
from titanlite.checkpoint.saver import Snapshot, about_save
from titanlite.checkpoint.start import Restart, Resume, Start
from titanlite.checkpoint.state import TRAIN, Tensors, total_bytes
from titanlite.checkpoint.transfer import Transfer, exchange_files
from titanlite.checkpoint.writer import ShardWriter
from titanlite.config.component import ConfigError
from titanlite.log import logger
from titanlite.ranks import Ranks

SMALL = (".metadata", TRAIN, "job.toml", MANIFEST)  # the files of a copy that every node has
KEY = "checkpoint.memory_interval"


class Lineage(NamedTuple):
    """Which states a copy follows. `history`: of the run when the copy was made; a run that goes back to an
    earlier step begins another one. `newest_on_disk`: the step of the newest checkpoint then."""

    history: str
    newest_on_disk: int | None


class Offer(NamedTuple):
    """A copy of which a node has files. `sha256`: of its manifest."""

    step: int
    sha256: str
    lineage: Lineage


class Place(NamedTuple):
    """This rank among the ranks of its node."""

    local_rank: int
    num_local_ranks: int


def memory_folder(root: Path, run_folder: PurePath) -> Path:
    """The folder of the copies of the run in `run_folder`, on each node. `root`: the shared memory."""
    run = run_folder.resolve() if isinstance(run_folder, Path) else run_folder
    return root / f"titanlite-{os.getuid()}-{hashlib.sha256(str(run).encode()).hexdigest()[:16]}"


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """In the body, no other run deletes the copies in `folder`, which is made if it is missing. Otherwise
    another run that starts on this node deletes them, because memory is scarce. Raises ConfigError."""
    _make(folder)
    with open(folder / "LOCK", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _make(folder: Path) -> None:
    """Make a folder for copies if it is missing. Raises ConfigError if another user could write into it: the
    shared memory of a node is open to all users."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder):
            raise ConfigError(f"{folder} is not a folder of this user alone: remove it", KEY)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be used for copies in memory: {e}; set it to 0", KEY) from None


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o77


def delete_unused(root: Path, but: Path) -> None:
    """Delete the copies of this user's other runs on this node that no process uses: their launchers were
    killed, or have crashed and did not come back."""
    for folder in root.glob(f"titanlite-{os.getuid()}-*"):
        with suppress(OSError):  # in use, or just deleted
            if folder != but and _is_private(folder):
                with open(folder / "LOCK", "ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                logger.warning(f"deleted {folder}: copies in memory of a run that is not running")


class NodeMemory:
    """The copies of one run, on this rank's node and on all others. The constructor and all methods are
    collective unless they say otherwise. The constructor raises ConfigError if a node has no such memory.

    `root`: the shared memory of this node."""

    def __init__(self, root: Path, run_folder: PurePath, ranks: Ranks, place: Place):
        self.folder, self._ranks, self._place = memory_folder(root, run_folder), ranks, place
        self._is_first = place.local_rank == 0
        self._node = ranks.rank - place.local_rank  # the first rank of the node
        self.is_on = True
        """Whether copies are made: they fit, and none has failed."""
        self._has_logged = False
        self._use = ExitStack()
        self._holders: dict[str, list[int]] = {}  # on rank 0: the nodes that have a shard of the chosen copy
        if problem := ranks.first(self._open(root)):
            raise problem
        # Shards go from each rank to the rank at the same place of the next node.
        is_even = ranks.rank % place.num_local_ranks == place.local_rank
        sizes = ranks.all_reduce(frozenset([place.num_local_ranks if is_even else -1]), frozenset[int].__or__)
        self.has_partner = sizes == {place.num_local_ranks} and ranks.size > place.num_local_ranks
        if ranks.rank == 0 and len(sizes) > 1:
            logger.warning(
                "the nodes have different numbers of ranks: copies in memory have no partner node, and are "
                "lost with their node"
            )

    def _open(self, root: Path) -> ConfigError | None:
        """Make the folder. Returns the error if that is not possible. Not collective."""
        try:
            self._use.enter_context(in_use(self.folder))  # until this process ends
        except ConfigError as e:
            return e
        if self._is_first:
            delete_unused(root, but=self.folder)
            commit.clean(self.folder)
        return None

    def path(self, candidate: Candidate) -> Path:
        """The folder of a copy on this node. Not collective."""
        return self.folder / f"step-{candidate.step}"

    # ---- choosing a copy

    def newer(self, start: Start) -> Start:
        """`start`, or a resume from the newest copy that belongs to the run and is later than the checkpoint
        of `start`, if all its bytes are as they were written on the nodes that are left. Logs the choice."""
        offers = self._ranks.gather(self._offers() if self._is_first else [])
        usable = self._ranks.from_rank_zero(lambda: self._usable(offers or [], start))
        for offer in usable:
            candidate = self._verified(offer)
            if candidate is not None:
                self._log(f"resuming from the copy in memory of step {offer.step}; {_describe(start)}")
                if isinstance(start, Resume):
                    return replace(start, candidate=candidate)
                return Resume(candidate, history=start.history)
        if usable:
            self._log(f"the copy in memory of step {usable[0].step} is lost; {_describe(start)}")
        return start

    def _offers(self) -> list[Offer]:
        offers = []
        for step, path in commit.list_committed(self.folder):
            with suppress(CheckpointError, OSError, KeyError, TypeError):
                manifest = commit.read_manifest(path)
                lineage = Lineage(manifest["history"], manifest["newest_on_disk"])
                offers.append(Offer(step, manifest["sha256"], lineage))
        return offers

    def _usable(self, offers: Sequence[list[Offer]], start: Start) -> list[Offer]:
        """The copies that are later states of the run than `start`, the latest first. Called on rank 0."""
        if isinstance(start, Restart) or not start.history:
            return []
        on_disk = -1
        if isinstance(start, Resume):  # a damaged checkpoint was newer, and the copy may follow it
            steps = [commit.step_of(path) or 0 for path, _ in start.faults]
            on_disk = max([start.candidate.step, *steps])
        usable = {
            offer
            for of_node in offers
            for offer in of_node
            if offer.lineage.history == start.history
            and offer.step > on_disk
            # Otherwise the user has removed the newest checkpoints, to go back.
            and (-1 if (newest := offer.lineage.newest_on_disk) is None else newest) <= on_disk
        }
        return sorted(usable, reverse=True, key=lambda offer: offer.step)

    def _verified(self, offer: Offer) -> Candidate | None:
        """The copy, of which every node now has the small files; None if bytes of it are lost or damaged.
        Files that are damaged are deleted."""
        path, manifest, small = self.folder / f"step-{offer.step}", None, None
        with suppress(CheckpointError, OSError):
            manifest = commit.read_manifest(path)
            if manifest["sha256"] == offer.sha256:
                small = {name: commit.read_file(path, name, manifest) for name in SMALL if name != MANIFEST}
                small[MANIFEST] = (path / MANIFEST).read_bytes()
        intact = self._intact(path, manifest) if small is not None and manifest is not None else []
        nodes = self._ranks.gather((self._node, intact))
        small = self._ranks.first(small)
        if small is None:
            return None
        manifest = json.loads(small[MANIFEST])
        if not self._ranks.from_rank_zero(lambda: self._is_whole(offer.step, manifest, nodes or [])):
            return None
        problem = None
        if self._is_first:
            try:
                self._write_small(path, small)
            except OSError as e:
                problem = f"{path}: {e}"
        if problem := self._ranks.first(problem):
            self._warn(f"the copy in memory of step {offer.step} is not used: {problem}")
            return None
        train, job_toml = json.loads(small[TRAIN]), small["job.toml"].decode()
        return Candidate(offer.step, path, manifest, train, job_toml, in_memory=True)

    def _intact(self, path: Path, manifest: Manifest) -> list[str]:
        """The shards of this node that are as they were written, of those that this rank hashes: each rank of
        the node hashes a share. Not collective."""
        digests = commit.digests(manifest)
        names = sorted(name for name in digests if name.endswith(SHARD_SUFFIX) and (path / name).exists())
        mine = names[self._place.local_rank :: self._place.num_local_ranks]
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            faults = pool.map(lambda name: _fault(path / name, digests[name]), mine)
        intact = []
        for name, fault in zip(mine, faults):
            if fault is None:
                intact.append(name)
            else:
                logger.warning(f"a damaged file of the copy in memory {path} is deleted: {fault}")
                with suppress(OSError):
                    (path / name).unlink()
        return intact

    def _is_whole(self, step: int, manifest: Manifest, nodes: Sequence[tuple[int, list[str]]]) -> bool:
        """Whether the nodes have all shards. Remembers which node has which. Called on rank 0."""
        self._holders = {name: [] for name in manifest["files"] if name.endswith(SHARD_SUFFIX)}
        for node, names in nodes:
            for name in names:
                self._holders[name].append(node)
        lost = [name for name, holders in self._holders.items() if not holders]
        if lost:
            self._warn(
                f"the copy in memory of step {step} is not used: {len(lost)} of {len(self._holders)} files "
                f"are lost or damaged, for example {min(lost)}"
            )
        return not lost

    def _write_small(self, path: Path, small: dict[str, bytes]) -> None:
        """Make the folder of a copy on a node that has no usable part of it. Not collective."""
        with suppress(OSError):
            if all((path / name).read_bytes() == data for name, data in small.items()):
                return
        shutil.rmtree(path, ignore_errors=True)
        partial = commit.partial_path(self.folder, 0)
        partial.mkdir()
        for name, data in small.items():
            (partial / name).write_bytes(data)
        partial.rename(path)

    def fetch(self, candidate: Candidate, names: Collection[str]) -> None:
        """Get the shards `names` of the chosen copy, which this rank reads, from other nodes, as far as this
        node lacks them. Raises Damaged on all ranks if that fails."""
        wanted = self._ranks.gather((self._node, sorted(names)))
        orders = self._ranks.scatter(lambda: self._transfers(candidate.manifest, wanted or []))
        problem = None
        for sends, receives in orders:
            problem = exchange_files(self.path(candidate), self._ranks, sends, receives) or problem
        if problem := self._ranks.first(problem):
            raise Damaged(problem)

    def _transfers(
        self, manifest: Manifest, wanted: Sequence[tuple[int, list[str]]]
    ) -> list[list[tuple[Transfer | None, Transfer | None]]]:
        """For each rank, the files that it sends and receives, in one order of all transfers. The first rank
        of a node transfers for it. Called on rank 0."""
        orders: list[list[tuple[Transfer | None, Transfer | None]]] = [[] for _ in range(self._ranks.size)]
        sent, digests = Counter[int](), commit.digests(manifest)
        for node, name in sorted({(node, name) for node, names in wanted for name in names}):
            holders = self._holders[name]
            if node in holders:
                continue
            source = min(holders, key=lambda holder: sent[holder])
            sent[source] += digests[name].size
            files = {name: digests[name]}
            orders[source].append((Transfer(node, files), None))
            orders[node].append((None, Transfer(source, files)))
        return orders

    # ---- making a copy

    def check_room(self, tensors: Tensors) -> None:
        """Make no copies, and say so, if a node has no room for two: one is complete while the other one is
        written."""
        ranks, place = self._ranks, self._place
        share = total_bytes(tensors, ranks) // ranks.size * place.num_local_ranks
        needed = int(share * commit.SLACK) * 2 * (2 if self.has_partner else 1)
        problem = None
        if self._is_first:
            free = min(shutil.disk_usage(self.folder).free, _available_memory()) + _used(self.folder)
            if free < needed:
                problem = (
                    f"no copies in memory are made: they need {gib(needed)} per node, and "
                    f"{self.folder.parent} on the node of rank {ranks.rank} has room for {gib(free)}"
                )
        if problem := ranks.first(problem):
            self._turn_off(problem)
        elif ranks.rank == 0:
            nodes = "on this node and on the next one" if self.has_partner else "on this node only"
            logger.info(f"copies in memory need at most {gib(needed)} of shared memory per node, {nodes}")

    def write(self, snapshot: Snapshot, lineage: Lineage, plans: SavePlans) -> None:
        """Make a copy of the state, of which this rank writes its shards. Runs on the saving thread. If that
        fails on any rank, the copy before is kept, and no more copies are made."""
        ranks, step, began = self._ranks, snapshot.step, time.perf_counter()
        name = ranks.from_rank_zero(lambda: commit.partial_path(self.folder, step).name)
        partial = self.folder / name
        try:
            self._agree(partial.mkdir, exist_ok=True)  # all ranks of a node try
            writer = ShardWriter(partial)
            written = plans.write(snapshot.tensors, writer)
            sending = time.perf_counter()
            self._send_to_partner(partial, writer, written)
            sent_s = time.perf_counter() - sending
            about = {**snapshot.about, **about_save(ranks.size), **lineage._asdict()}
            small = ranks.from_rank_zero(lambda: _complete(partial, snapshot, plans, writer, written, about))
            self._agree(self._write_all, partial, small)
            self._agree(self._commit, partial, step)
        except CheckpointError as e:
            if self._is_first:
                shutil.rmtree(partial, ignore_errors=True)
            self._turn_off(f"step {step} could not be copied to memory: {e}; no more copies are made")
            return
        self.keep_only(step)
        if ranks.rank == 0 and not self._has_logged:
            size, rate = sum(file.size for file in writer.files.values()), ""
            if self.has_partner and sent_s > 0:
                rate = f", {gib(int(size / sent_s))}/s to the next node"
            logger.info(
                f"copied step {step} to memory in {time.perf_counter() - began:.2f} s ({gib(size)} per rank"
                f"{rate}); later copies are not logged"
            )
            self._has_logged = True

    def _send_to_partner(self, partial: Path, writer: ShardWriter, written: list[WriteReport] | None) -> None:
        """Send this rank's files to the next node, and receive those of the node before."""
        if not self.has_partner:
            return
        ranks, distance = self._ranks, self._place.num_local_ranks
        before = ranks.scatter(lambda: _files_before(written or [], distance))
        target, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
        sends, receives = Transfer(target, dict(writer.files)), Transfer(source, before)
        if problem := ranks.first(exchange_files(partial, ranks, sends, receives)):
            raise CheckpointError(problem)

    def _write_all(self, partial: Path, small: dict[str, bytes]) -> None:
        if self._is_first and self._ranks.rank > 0:
            for name, data in small.items():
                (partial / name).write_bytes(data)

    def _commit(self, partial: Path, step: int) -> None:
        if self._is_first:
            partial.rename(self.folder / f"step-{step}")

    def _agree(self, act: Any, *args: Any, **kwargs: Any) -> None:
        """Call `act` on all ranks. Raises CheckpointError on all of them if it raises an OSError on one."""
        problem = None
        try:
            act(*args, **kwargs)
        except OSError as e:
            problem = f"rank {self._ranks.rank}: {type(e).__name__}: {e}"
        if problem := self._ranks.first(problem):
            raise CheckpointError(problem)

    def keep_only(self, step: int | None) -> None:
        """Delete all copies on this node but that of `step`. Not collective."""
        if not self._is_first:
            return
        for other, path in commit.list_committed(self.folder):
            if other != step:
                trash = self.folder / f".trash-{path.name}"
                with suppress(OSError):
                    path.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)

    def delete(self) -> None:
        """Delete the folder of this node: the run has saved its last state on the disk. Not collective."""
        self._use.close()
        if self._is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _turn_off(self, reason: str) -> None:
        self.is_on = False
        self._warn(reason)

    def _warn(self, text: str) -> None:
        if self._ranks.rank == 0:
            logger.warning(text)

    def _log(self, text: str) -> None:
        if self._ranks.rank == 0:
            logger.info(text)


def _describe(start: Start) -> str:
    if isinstance(start, Resume):
        return f"the newest checkpoint on disk is step {start.candidate.step}"
    return "there is no checkpoint on disk"


class CopyFiles(HashingFileSystem):
    """Reads the shards of the copy `candidate`, which this node gets from others if it lacks them. Has the
    interface of resume.Verification; all bytes were verified when the copy was chosen."""

    def __init__(self, memory: NodeMemory, candidate: Candidate):
        super().__init__()
        self._memory, self._candidate, self.path = memory, candidate, memory.path(candidate)

    def prepare(self, names: Callable[[], Collection[str]]) -> None:
        self._memory.fetch(self._candidate, names())

    def result(self) -> str | None:
        """No damage."""
        return None

    def close(self) -> None:
        """The files stay: they are the newest copy until the next one."""


def _fault(path: Path, expected: FileDigest) -> str | None:
    try:
        return fault_of(path, expected, digest_file)
    except OSError as e:
        return f"{path.name}: {e}"


def _files_before(written: Sequence[WriteReport], distance: int) -> list[dict[str, FileDigest]]:
    """For each rank, the files that the rank at its place on the node before has written. Raises
    CheckpointError if a rank has not written its shards."""
    if problem := next((report.problem for report in written if report.problem), None):
        raise CheckpointError(problem)
    return [written[(rank - distance) % len(written)].files for rank in range(len(written))]


def _complete(
    partial: Path,
    snapshot: Snapshot,
    plans: SavePlans,
    writer: ShardWriter,
    written: list[WriteReport] | None,
    about: dict[str, Any],
) -> dict[str, bytes]:
    """Write the small files of a copy, and return them. Called on rank 0."""
    assert written is not None
    try:
        files = plans.finish(writer, written)
        commit.write_manifest(partial, snapshot.step, snapshot.texts, files, about)
        return {name: (partial / name).read_bytes() for name in SMALL}
    except OSError as e:
        raise CheckpointError(f"rank 0: {type(e).__name__}: {e}") from e


def _used(folder: Path) -> int:
    """Bytes of the files in a folder of copies."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _available_memory() -> int:
    """Bytes of host memory that new programs can use without swapping."""
    with open("/proc/meminfo") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    return kib << 10
