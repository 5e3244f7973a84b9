"""The points at which a save, a resume, going back to an earlier step and a quarantine are killed, by name.

P0 to P8 are the phases of a save: agreed, begun, staged, shards, their metadata, the small files, the rename,
the agreement that the save is complete, retention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.support.faults import Fault

SHARD, META, TRAIN, MANIFEST = ".distcp", ".metadata", "train.json", "manifest.json"
FINAL, TRASH, PARTIAL, PROBE = "checkpoint/step-", ".trash-", ".partial-", ".probe-"


@dataclass(frozen=True)
class Point(Fault):
    """A named call. `shared`: every rank makes the call, not only rank 0. `commits`: the save is committed by
    then. `late`: rank 0 can commit the save after the other rank is killed here."""

    shared: bool = False
    commits: bool = False
    late: bool = False

    def at(self, rank: int, **changes: Any) -> Point:
        """The same point for another rank. If only rank 0 makes the call, the other rank is killed at rank
        0's call."""
        changes["rank" if self.shared else "victim"] = rank
        return replace(self, **changes)


SYNC = "titanlite.storage:LocalDisk.sync"
SAVE = {
    "P0 agreed": Point("checkpointer:Checkpointer.save", during="save", shared=True),
    "P1 before begin": Point("commit:begin"),
    "P1 begun": Point("commit:begin", "after"),
    "P1 agreed": Point("titanlite.ranks:Ranks.from_rank_zero", "after", shared=True),
    "P2 before the copy": Point("staging:HostBuffers.copy", during="save", shared=True),
    "P2 in the copy": Point("staging:HostBuffers._on_host", "after", 9, during="save", shared=True),
    "P2 copied": Point("staging:HostBuffers.copy", "after", during="save", shared=True),
    "P2 all copied": Point("titanlite.ranks:Ranks.first", "after", shared=True),
    "P3 planned": Point("writer:ShardWriter.prepare_local_plan", "after", shared=True),
    "P3 before the shards": Point("writer:ShardWriter.write_data", shared=True),
    "P3 second file": Point("writer:ShardWriter.write_file", "before", 2, shared=True),
    "P3 half a write": Point("digest:HashingFile.write", "half", 20, SHARD, shared=True),
    "P3 before fsync": Point("os:fsync", shared=True),
    "P3 after fsync": Point("os:fsync", "after", shared=True),
    "P3 before the folder's fsync": Point(SYNC, shared=True),
    "P3 shards written": Point("writer:ShardWriter.write_data", "after", shared=True),
    "P4 before the results": Point("titanlite.ranks:Ranks.gather", shared=True),
    "P4 results gathered": Point("titanlite.ranks:Ranks.gather", "after", shared=True, late=True),
    "P4 before .metadata": Point("writer:ShardWriter.finish", late=True),
    "P4 half of .metadata": Point("digest:HashingFile.write", "half", 1, META, late=True),
    "P4 .metadata unnamed": Point("writer:HashingFileSystem.rename", late=True),
    "P4 .metadata named": Point("writer:HashingFileSystem.rename", "after", late=True),
    "P5 before the commit": Point("commit:commit", late=True),
    "P5 half of train.json": Point("digest:HashingFile.write", "half", 1, TRAIN, late=True),
    "P5 train.json": Point("commit:write_file", "after", 1, TRAIN, late=True),
    "P5 before the manifest": Point("commit:write_file", "before", 1, MANIFEST, late=True),
    "P5 half of the manifest": Point("digest:HashingFile.write", "half", 1, MANIFEST, late=True),
    "P5 manifest": Point("commit:write_file", "after", 1, MANIFEST, late=True),
    "P5 folder synced": Point(SYNC, "after", 2, late=True),
    "P6 before the rename": Point("os:rename", "before", 1, FINAL, late=True),
    "P6 renamed": Point("os:rename", "after", 1, FINAL, commits=True),
    "P6 parent synced": Point(SYNC, "after", 3, commits=True),
    "P7 agreed": Point("titanlite.ranks:Ranks.from_rank_zero", "after", 2, shared=True, commits=True),
    "P7 written": Point("saver:Saver._save", "after", shared=True, commits=True),
    "P8 before retention": Point("commit:retain", commits=True, step=6),
    "P8 before .trash": Point("os:rename", "before", 1, TRASH, commits=True, step=6),
    "P8 .trash": Point("os:rename", "after", 1, TRASH, commits=True, step=6),
    "P8 .trash synced": Point(SYNC, "after", 5, commits=True, step=6),
    "P8 half deleted": Point("shutil:rmtree", "half", 1, TRASH, commits=True, step=6),
    "P8 retained": Point("commit:retain", "after", commits=True, step=6),
}
# Points at which the writer itself can raise an error.
ERRORS = {
    "P1 disk full?": Point("os:statvfs", action="error"),
    "P2 no memory": Point("staging:HostBuffers.allocate", during="save", action="no_memory", shared=True),
} | {
    name: replace(point, action="error")
    for name, point in SAVE.items()
    if point.during == "write" and not point.target.startswith("titanlite.ranks:") and point.step == 4
    if name not in ("P1 begun", "P7 written")
}
RESOLVE = "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.resolve_tensor"
WRITE_NEW = "titanlite.files:write_new"
RESUME = {
    "lock taken": Point("lock:FolderLock.take", "after"),
    "half of the small files": Point("commit:read_file", "before", 2),
    "chosen": Point("resume:newest", "after"),
    "seen by all ranks": Point("resume:check_shared", "after", shared=True),
    "before cleaning": Point("commit:clean"),
    "half cleaned": Point("shutil:rmtree", "half", 1, PARTIAL),
    "partly cleaned": Point("shutil:rmtree", "after", 1, PARTIAL),
    "cleaned": Point("commit:clean", "after"),
    # Before the other kills at a probe in the same run: the start after these removes what they left.
    "probe half removed": Point("shutil:rmtree", "half", 1, PROBE),
    "probe": Point("resume:_make_probe", "after"),
    "probe written": Point("resume:write_file", "after", shared=True),
    "before the owner is written": Point("lock:FolderLock.write_owner"),
    "before the commit is recorded": Point("os:replace", "before", 1, "last_commit"),
    "the commit is recorded": Point("os:replace", "after", 1, "last_commit"),
    "before loading": Point("checkpointer:load_tensors", shared=True),
    "metadata read": Point("reader:read_metadata", "after"),
    "half verified": Point("digest:digest_file", "before", 2, SHARD, shared=True),
    "half read": Point(RESOLVE, "after", 20, shared=True),
    "read": Point("reader:SafeReader.read_data", "after", shared=True),
    "verified": Point("resume:Verification.result", "after", shared=True),
    "restored": Point("checkpointer:Checkpointer.load", "after", shared=True),
    "half of job.toml": Point(WRITE_NEW, "half", 1, "job.toml"),
    "half of env.json": Point(WRITE_NEW, "half", 1, "env.json"),
    "half of run_identity.json": Point(WRITE_NEW, "half", 1, "run_identity.json"),
    "run_identity.json not renamed": Point("os:replace", "before", 1, "run_identity.json"),
    "before metrics are cut": Point("os:replace", "before", 1, "metrics.jsonl"),
    "metrics cut": Point("os:replace", "after", 1, "metrics.jsonl"),
    "first step": Point("titanlite.train:grad_norms", shared=True),
}
REWIND = {
    "before the moves": Point("commit:archive_after"),
    "before the first": Point("os:rename", "before", 1, "archived-"),
    "one moved": Point("os:rename", "after", 1, "archived-"),
    "two moved": Point("os:rename", "after", 2, "archived-"),
    "all moved": Point("os:rename", "after", 3, "archived-"),
    "moved": Point("commit:archive_after", "after"),
}
QUARANTINE = {
    "before": Point("commit:quarantine"),
    "one": Point("os:rename", "after", 1, "quarantined-"),
    "before the second": Point("commit:quarantine", "before", 2),
    "both": Point("os:rename", "after", 2, "quarantined-"),
}
for points in (RESUME, REWIND, QUARANTINE):
    points.update({name: replace(point, during="start") for name, point in points.items()})
