"""`titanlite launch`: start several trainer processes on this node, through torchrun's agent.

The job is loaded and checked first, so that a mistake is reported in one line before any process starts.
torchrun reports every failure as exit code 1 and kills ranks 30 s after SIGTERM. This launcher returns the
exit code of the rank that failed first, passes signals to the ranks, gives them the time they need to save,
and restarts them only after a crash."""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import tempfile
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher import api as launcher

from titanlite import train
from titanlite.commands import launch_arguments
from titanlite.job import load_job
from titanlite.log import tell
from titanlite.runtime import process, rendezvous
from titanlite.runtime.agent import Agent, RanksFailed
from titanlite.runtime.environment import prepare_to_launch
from titanlite.runtime.signals import handled_signals


def main(argv: Sequence[str]) -> int:
    """Check the job and run it on all processes. Returns the exit code."""
    process.stop_with_tune()
    options, path, overrides = launch_arguments(argv)
    world_size = options.nproc_per_node * options.max_nodes
    load_job(path, overrides, world_size, allow_imports=True)
    if world_size == 1 and options.max_restarts == 0:
        return train.main([path, *overrides])
    return start_ranks(options, ["train", path, *overrides])


def start_ranks(options: argparse.Namespace, words: list[str]) -> int:
    """Run the command `titanlite WORDS` on every rank of this node. Returns the exit code. `options`: of
    launch_arguments."""
    prepare_to_launch()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # the agent reports a failure in one line instead
            logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous.register(options.node_rank)
    setattr(launcher, "LocalElasticAgent", Agent)  # noqa: B010 -- launch_agent() has no parameter for it
    run_id = secrets.token_hex(8) if options.max_nodes == 1 else options.rdzv_id or "titanlite"
    # torch would pass SIGHUP to the ranks even if nohup ignores it.
    handled = [number.name for number in (*handled_signals(), signal.SIGQUIT)]
    with tempfile.TemporaryDirectory(prefix="titanlite-", ignore_cleanup_errors=True) as folder:  # mode 0700
        arguments = [
            f"--nproc-per-node={options.nproc_per_node}",
            f"--nnodes={options.nnodes}",
            f"--rdzv-backend={rendezvous.BACKEND}",
            f"--rdzv-endpoint={options.rdzv_endpoint or 'localhost:0'}",
            f"--rdzv-id={run_id}",
            f"--max-restarts={options.max_restarts}",
            f"--log-dir={folder}",
            f"--signals-to-handle={','.join(handled)}",
            "-m", "titanlite.cli", *words,
        ]  # fmt: skip
        try:
            torchrun.run(torchrun.parse_args(arguments))
        except RanksFailed as failed:
            return failed.exit_code
        except rendezvous.NotReached as error:
            tell(error)
            return error.exit_code
        except RendezvousConnectionError:
            tell(f"cannot connect to {options.rdzv_endpoint}: is the first node's launcher running?")
            return 1
        except SignalException as error:
            tell(f"ended by {error.sigval.name} without saving")
            return 128 + error.sigval
    return 0
