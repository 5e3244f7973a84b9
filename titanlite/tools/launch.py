"""`titanlite launch`: start several trainer processes on this node, through torchrun's agent.

The job is loaded and checked before any rank begins, so that a mistake is reported in one line. The ranks'
processes are copies of this one, made after it has imported PyTorch: the imports take seconds."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from titanlite.commands import launch_arguments
from titanlite.config import toml
from titanlite.runtime.environment import importing_for_copies, prepare_to_launch
from titanlite.runtime.parent import stop_with_tune


def main(argv: Sequence[str]) -> int:
    """Check the job and run it on all processes. Returns the exit code."""
    stop_with_tune()
    options, path, overrides = launch_arguments(argv)
    world_size = options.nproc_per_node * options.max_nodes
    if world_size == 1 and options.max_restarts == 0:
        from titanlite import train

        return train.main([path, *overrides])
    compiles = toml.read(path, overrides)[0].get("compile", {}).get("enable")
    prepare_to_launch(options.nproc_per_node)
    importlib.import_module("titanlite.train")  # what the ranks run; takes seconds
    from titanlite import cli
    from titanlite.job import load_job
    from titanlite.runtime.launcher import start_ranks
    from titanlite.runtime.waiting_ranks import WaitingRanks
    from titanlite.torch_compat import import_compiler

    with importing_for_copies():
        import_compiler(with_inductor=bool(compiles))
    words = ["train", path, *overrides]
    with WaitingRanks(words, options.nproc_per_node, cli.main) as ranks:
        load_job(path, overrides, world_size, allow_imports=True)  # with the user's components
        return start_ranks(options, words, ranks.begin)
