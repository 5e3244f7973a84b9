"""`titanlite launch`: start several trainer processes on this node, through torchrun's agent.

The job is loaded and checked before any rank begins, so that a mistake is reported in one line."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.log import tell
from titanlite.runtime.environment import prepare_to_launch, shared_memory
from titanlite.runtime.fork_server import fork_server
from titanlite.runtime.notices import stop_at_notice
from titanlite.runtime.parent import stop_with_tune
from titanlite.runtime.signals import Stopped, stop_requests
from titanlite.tools.verbs import launch_arguments

if TYPE_CHECKING:
    from titanlite.job import Job

# After a crash, lack of memory and a signal to stop, the same command may come back to this node and continue
# from the copies of the state in its memory. All other exit codes end the run on this node.
RESUMABLE = {1, 5, Stopped.exit_code}


def main(argv: Sequence[str]) -> int:
    """Check the job and run it on all processes. Returns the exit code."""
    stop_with_tune()
    options, path, overrides = launch_arguments(argv)
    world_size = options.nproc_per_node * options.max_nodes
    if world_size == 1 and options.max_restarts == 0 and options.grace is None:
        from titanlite import train

        with stop_at_notice(options.notice):
            return train.main([path, *overrides])
    prepare_to_launch(options.nproc_per_node)
    words = ["train", path, *overrides]
    with fork_server(words) as server:  # it imports while this process does
        from titanlite.runtime.launcher import start_ranks

        job, options.node_numbers = _check_job(options, path, overrides)
        with stop_requests(), stop_at_notice(options.notice), _memory_for_copies(job) as memory:
            exit_code = start_ranks(options, words, server)
            if exit_code not in RESUMABLE:
                shutil.rmtree(memory, ignore_errors=True)
    return exit_code


@contextmanager
def _memory_for_copies(job: Job) -> Iterator[Path]:
    """The folder of the job's copies of its state in the memory of this node, which is in use in the body."""
    from titanlite.checkpoint.memory import in_use, memory_folder

    folder = memory_folder(shared_memory(), job.folder)
    with in_use(folder) if job.checkpoint.memory_interval else nullcontext():
        yield folder


def _check_job(options: Namespace, path: str, overrides: Sequence[str]) -> tuple[Job, list[int]]:
    """Load the job, with the user's components, and check it. Returns the job and the numbers of nodes of
    NNODES on which it can train. Raises ConfigError."""
    from titanlite.job import load_job

    job = load_job(path, overrides, None, allow_imports=True)
    try:
        numbers = _node_numbers(job, options)
        job.check_folders()
    except ConfigError as e:
        raise toml.read(path, overrides)[1].located(e) from None
    return job, numbers


def _node_numbers(job: Job, options: Namespace) -> list[int]:
    """The numbers of nodes of NNODES that pass the job's checks, in ascending order, at least one. Says why
    if others do not. Raises the ConfigError of the largest number if none does."""
    numbers, problem = [], None
    for nodes in range(options.min_nodes, options.max_nodes + 1):
        try:
            _check_nodes(job, options, nodes)
            numbers.append(nodes)
        except ConfigError as e:
            problem = e
    if problem is not None:
        if not numbers:
            raise problem
        tell(f"the job trains on {', '.join(map(str, numbers))} nodes only: {problem}")
    return numbers


def _check_nodes(job: Job, options: Namespace, nodes: int) -> None:
    """Check the job for this number of nodes. All are taken to have this node's number of ranks. Raises
    ConfigError."""
    batch_size, ngpu = job.training.global_batch_size, options.nproc_per_node
    try:
        if batch_size == -1 and options.max_nodes > options.min_nodes:
            key = "training.global_batch_size"
            raise ConfigError("-1 depends on the number of ranks: set a number of sequences", key)
        job.check(nodes * ngpu)
    except ConfigError as e:
        if options.max_nodes == 1:
            raise
        num = "1 node" if nodes == 1 else f"{nodes} nodes"
        text = f"{e}; checked for {num} (NNODES={options.nnodes}) with NGPU={ngpu} on each node"
        raise ConfigError(text, e.key) from None
