"""Which rank writes which shard of a checkpoint, and the collective work of a save.

torch's `dcp.save` gathers the plans of all ranks on rank 0 and sends the metadata of the whole checkpoint to
all ranks, at every save. On thousands of ranks that is gigabytes, and unpickling them blocks the training
thread for minutes. Here copies of a shard are merged on the way to rank 0, the metadata stays there, and the
plan is kept while the tensors stay the same. The files have the same contents as `dcp.save` writes."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import FileDigest
from titanlite.checkpoint.state import Tensors
from titanlite.checkpoint.state_digest import HashedShard
from titanlite.checkpoint.writer import ShardWriter
from titanlite.ranks import Ranks


class ShardOwners(NamedTuple):
    """A shard and the ranks that hold it, in ascending order. `position`: its place in the plan of the first
    of these ranks."""

    item: WriteItem
    position: int
    ranks: list[int]


class LocalShards(NamedTuple):
    """The shards that some ranks hold. `names`: the keys of the nested dicts by DCP's flat names. `problem`:
    an error of one of these ranks."""

    shards: dict[MetadataIndex, ShardOwners]
    names: dict[str, tuple[str, ...]]
    problem: str | None


class WriteReport(NamedTuple):
    """The shards that one rank has written, and the digests of its files by name. `problem`: its error.
    `hashed`: ShardWriter.hashed."""

    results: list[WriteResult]
    files: dict[str, FileDigest]
    problem: str | None
    hashed: list[HashedShard | None]


class SavePlans:
    """The plan of this rank for the saves of one run."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._local: SavePlan | None = None  # all shards of this rank when the plan was made
        self._plan = SavePlan([])  # the shards that this rank writes
        self._metadata = Metadata({})  # of the whole checkpoint; on rank 0

    def write(self, tensors: Tensors, writer: ShardWriter) -> list[WriteReport] | None:
        """Write this rank's shards. Returns the work of all ranks on rank 0, None on every other rank. Raises
        CheckpointError on all ranks if no plan can be made. Collective."""
        planner = DefaultSavePlanner()
        plan = self._plan_for(tensors, planner, writer)
        results, problem = list[WriteResult](), None
        try:
            results = writer.write_data(planner.finish_plan(plan), planner).value()
        except Exception as e:  # rank 0 must hear of every error before it commits
            problem = self._described(e)
        return self._ranks.gather(WriteReport(results, writer.files, problem, writer.hashed))

    def finish(self, writer: ShardWriter, written: list[WriteReport]) -> dict[str, FileDigest]:
        """Write `.metadata`, and return the digests of the files of all ranks. Called on rank 0. Raises
        CheckpointError if a rank has not written its shards, or for any other error."""
        if problem := next((by_rank.problem for by_rank in written if by_rank.problem), None):
            raise CheckpointError(problem)
        try:
            writer.finish(self._metadata, [by_rank.results for by_rank in written])
        except Exception as e:
            raise self._save_error(e) from e
        digests = {name: digest for by_rank in written for name, digest in by_rank.files.items()}
        return digests | writer.files

    def _plan_for(self, tensors: Tensors, planner: DefaultSavePlanner, writer: ShardWriter) -> SavePlan:
        """The plan of this rank, which is made again if the tensors of any rank have changed. Collective."""
        ranks, local, problem = self._ranks, SavePlan([], planner_data={}), None
        is_coordinator = ranks.rank == 0
        try:
            planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator)
            writer.set_up_storage_writer(is_coordinator)
            local = writer.prepare_local_plan(planner.create_local_plan())
        except Exception as e:  # the other ranks wait for this one
            problem = self._described(e)
        if ranks.all_reduce(problem is not None or local != self._local, operator.or_):
            shards = {item.index: ShardOwners(item, i, [ranks.rank]) for i, item in enumerate(local.items)}
            merged = ranks.reduce(LocalShards(shards, local.planner_data, problem), merge)
            self._plan = ranks.scatter(lambda: self._global_plan(merged, planner, writer))
            self._local = local
        return self._plan

    def _global_plan(
        self, merged: LocalShards | None, planner: DefaultSavePlanner, writer: ShardWriter
    ) -> list[SavePlan]:
        """The plans of all ranks. Called on rank 0. Raises CheckpointError if a rank has no plan, or
        for any other error."""
        assert merged is not None
        if merged.problem:
            raise CheckpointError(merged.problem)
        plans = [SavePlan(items, planner_data={}) for items in distribute(merged.shards, self._ranks.size)]
        plans[0].planner_data.update(merged.names)
        try:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
        except Exception as e:
            raise self._save_error(e) from e
        self._metadata = metadata
        return plans

    def _save_error(self, error: Exception) -> CheckpointError:
        """`error` as one that fails the save and not the run."""
        return error if isinstance(error, CheckpointError) else CheckpointError(self._described(error))

    def _described(self, error: Exception) -> str:
        return f"rank {self._ranks.rank}: {type(error).__name__}: {error}"


def merge(first: LocalShards, later: LocalShards) -> LocalShards:
    """The shards of two groups of ranks; the ranks of `first` are the lower ones. Changes `first`."""
    for index, copies in later.shards.items():
        if index in first.shards:
            first.shards[index].ranks.extend(copies.ranks)
        else:
            first.shards[index] = copies
    # DCP's own order of names, so that the metadata has the same bytes: names of later ranks come first.
    return LocalShards(first.shards, {**later.names, **first.names}, first.problem or later.problem)


def distribute(shards: dict[MetadataIndex, ShardOwners], num_ranks: int) -> list[list[WriteItem]]:
    """The shards that each rank writes: each goes to the rank with the least to write so far of those that
    hold it, as in DCP's dedup_save_plans."""
    num_bytes = [0] * num_ranks
    by_rank: list[list[ShardOwners]] = [[] for _ in range(num_ranks)]
    for copies in shards.values():
        rank = min(set(copies.ranks), key=num_bytes.__getitem__)  # a set, for DCP's choice among equals
        num_bytes[rank] += copies.item.tensor_storage_size() or 1
        by_rank[rank].append(copies)
    return [[copies.item for copies in sorted(own, key=lambda c: c.position)] for own in by_rank]
