"""`titanlite launch`: start several trainer processes on this node, through torchrun's agent.

The job is loaded and checked before any rank begins, so that a mistake is reported in one line. The processes
start before that, if there are cores for them, and import PyTorch meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.commands import launch_arguments
from titanlite.data.worker_pool import num_cores
from titanlite.runtime.environment import prepare_to_launch
from titanlite.runtime.parent import stop_with_tune
from titanlite.runtime.waiting_ranks import WaitingRanks


def main(argv: Sequence[str]) -> int:
    """Check the job and run it on all processes. Returns the exit code."""
    stop_with_tune()
    options, path, overrides = launch_arguments(argv)
    world_size = options.nproc_per_node * options.max_nodes
    if world_size == 1 and options.max_restarts == 0:
        from titanlite import train

        return train.main([path, *overrides])
    words = ["train", path, *overrides]
    prepare_to_launch(options.nproc_per_node)
    count = options.nproc_per_node if options.nproc_per_node <= num_cores() else 0
    with WaitingRanks(words, count) as ranks:
        # These imports take seconds, in which the ranks' processes do the same.
        from titanlite.job import load_job
        from titanlite.runtime.launcher import start_ranks

        load_job(path, overrides, world_size, allow_imports=True)
        return start_ranks(options, words, ranks.begin)
