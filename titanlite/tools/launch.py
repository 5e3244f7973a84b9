"""`titanlite launch`: start several trainer processes on this node, through torchrun's agent.

The job is loaded and checked before any rank begins, so that a mistake is reported in one line. The ranks'
processes start earlier, to import PyTorch meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.commands import launch_arguments
from titanlite.runtime.waiting_ranks import WaitingRanks


def main(argv: Sequence[str]) -> int:
    """Check the job and run it on all processes. Returns the exit code."""
    options, path, overrides = launch_arguments(argv)
    world_size = options.nproc_per_node * options.max_nodes
    is_launched = world_size > 1 or options.max_restarts > 0
    with WaitingRanks(["train", path, *overrides], options.nproc_per_node if is_launched else 0) as ranks:
        # The imports take seconds, in which the ranks' processes do the same.
        from titanlite import train
        from titanlite.job import load_job
        from titanlite.runtime import process
        from titanlite.runtime.launcher import start_ranks

        process.stop_with_tune()
        if not is_launched:
            return train.main([path, *overrides])
        load_job(path, overrides, world_size, allow_imports=True)
        return start_ranks(options, ranks)
