"""The launcher: runs a command of titanlite on every rank of this node, through torchrun's agent.

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
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher import api as launcher

from titanlite.log import tell
from titanlite.runtime import rendezvous
from titanlite.runtime.agent import Agent, RanksFailed
from titanlite.runtime.fork_server import ForkServer
from titanlite.runtime.forked_ranks import RANK_COMMAND, forked_by
from titanlite.runtime.nodes import NODES, LeftRun, Nodes, register_nodes
from titanlite.runtime.signals import handled_signals

# Exit code and message for each error with which torch's rendezvous of several nodes ends.
NOT_MET = {
    RendezvousTimeoutError: (1, "gave up: not all of {nnodes} nodes have joined at {rdzv_endpoint}"),
    RendezvousClosedError: (
        1,
        "the run at {rdzv_endpoint} has ended; start all launchers again for another",
    ),
    RendezvousGracefulExitError: (
        0,
        "the run at {rdzv_endpoint} has ended without this node; see the logs of the other nodes",
    ),
    RendezvousConnectionError: (
        1,
        "cannot connect to {rdzv_endpoint}: is the program that listens there the first node's launcher?",
    ),
}


def start_ranks(options: argparse.Namespace, words: Sequence[str], server: ForkServer | None = None) -> int:
    """Run the command `titanlite WORDS` on every rank of this node. Returns the exit code. `options`: from
    launch_arguments. `server`: forks the ranks; None: each rank is a new program. Call prepare_to_launch
    before."""
    if server is not None:
        server.wait_until_ready()  # here signals are heeded, but not while ranks are started
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # the agent reports a failure in one line instead
            logging.getLogger(name).setLevel(logging.CRITICAL)
    Agent.grace_s, Agent.max_nodes = options.grace, max(options.node_numbers)
    setattr(launcher, "LocalElasticAgent", Agent)  # noqa: B010 -- launch_agent() has no parameter for it
    # torch would pass SIGHUP to the ranks even if nohup ignores it.
    handled = [number.name for number in (*handled_signals(), signal.SIGQUIT)]
    with tempfile.TemporaryDirectory(prefix="titanlite-", ignore_cleanup_errors=True) as folder:  # mode 0700
        arguments = [
            f"--nproc-per-node={options.nproc_per_node}",
            f"--nnodes={min(options.node_numbers)}:{max(options.node_numbers)}",
            f"--max-restarts={options.max_restarts}",
            f"--log-dir={folder}",
            f"--signals-to-handle={','.join(handled)}",
        ]
        # torchrun replaces $variables in the command.
        command = [*RANK_COMMAND, *(word.replace("$", "$$") for word in words)]
        try:
            arguments += _meeting(options)
            with forked_by(server):
                torchrun.run(torchrun.parse_args([*arguments, "--no-python", *command]))
        except RanksFailed as failed:
            return failed.exit_code
        except (rendezvous.NotReached, LeftRun) as error:
            tell(error)
            return error.exit_code
        except tuple(NOT_MET) as error:
            exit_code, text = NOT_MET[type(error)]
            tell(text.format(**vars(options)))
            return exit_code
        except SignalException as error:
            tell(f"ended by {error.sigval.name} without saving")
            return 128 + error.sigval
    return 0


def _meeting(options: argparse.Namespace) -> list[str]:
    """Return torchrun's options of the rendezvous, once the first node can be reached."""
    if options.max_nodes == 1:
        rendezvous.register_one_node()
        backend, endpoint, run_id = rendezvous.ONE_NODE, "localhost:0", secrets.token_hex(8)
    else:
        register_nodes()
        Nodes.numbers = options.node_numbers
        Nodes.is_first, Nodes.excludes_slow = options.node_rank == 0, options.exclude_slow
        backend, endpoint, run_id = NODES, options.rdzv_endpoint, options.rdzv_id or "titanlite"
        rendezvous.reach_first_node(endpoint, options.node_rank)
        tell(f"waiting for {options.nnodes} nodes at {endpoint}")
    return [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"]
