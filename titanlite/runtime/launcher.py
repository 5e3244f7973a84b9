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
from contextlib import nullcontext

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher import api as launcher

from titanlite.log import tell
from titanlite.runtime import rendezvous
from titanlite.runtime.agent import Agent, RanksFailed
from titanlite.runtime.signals import handled_signals
from titanlite.runtime.waiting_ranks import rank_command
from titanlite.torch_compat import Begin, begin_ranks_with


def start_ranks(options: argparse.Namespace, words: Sequence[str], begin: Begin | None = None) -> int:
    """Run the command `titanlite WORDS` on every rank of this node. Returns the exit code. `options`: of
    launch_arguments. `begin`: see WaitingRanks. Call prepare_to_launch before."""
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
            "--no-python",
            *(word.replace("$", "$$") for word in rank_command(words)),  # torchrun replaces $variables
        ]  # fmt: skip
        try:
            with begin_ranks_with(begin) if begin else nullcontext():
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
