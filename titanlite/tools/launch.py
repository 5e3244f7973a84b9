"""`titanlite launch`: several trainer processes on this node, through torchrun's agent.

The job is loaded and checked here first, so a mistake is one line before any process starts. torchrun answers
every failure with 1; here the code of the rank that failed first is passed on.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from titanlite import train
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.runtime import isolate_restarts


def main(argv: Sequence[str]) -> int:
    """Options of the launcher, then the trainer's own arguments."""
    parser = argparse.ArgumentParser(
        prog="titanlite launch", description=__doc__, allow_abbrev=False, add_help=False
    )
    parser.add_argument("--nproc-per-node", default="1", help="processes on this node")
    parser.add_argument("--nnodes", default="1", help="nodes")
    parser.add_argument("--node-rank", default="0", help="which of them this is")
    parser.add_argument(
        "--rdzv-endpoint", default="", help="host:port of the first node; needed for several nodes"
    )
    parser.add_argument("--max-restarts", default="0", help="restarts of all processes after a failure")
    parser.add_argument("config", help="the TOML file")
    if argv[:1] in (["-h"], ["--help"]) or not argv:
        parser.print_help()
        return 0
    options, overrides = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(overrides):
        return train.main([options.config, *overrides])
    for key, least in (("nproc_per_node", 1), ("nnodes", 1), ("node_rank", 0), ("max_restarts", 0)):
        setattr(options, key, _number(key, getattr(options, key), least))
    world_size = options.nproc_per_node * options.nnodes
    load_job(options.config, overrides, world_size)
    if world_size == 1 and options.max_restarts == 0:
        return train.main([options.config, *overrides])
    if options.nnodes > 1 and not options.rdzv_endpoint:
        parser.error("several nodes need --rdzv-endpoint (RDZV_ENDPOINT=host:port for run_train.sh)")
    return _torchrun(options, [options.config, *overrides])


def _number(key: str, text: str, least: int) -> int:
    if text.isdecimal() and int(text) >= least:
        return int(text)
    name = {"nproc_per_node": "NGPU"}.get(key, key.upper())
    raise ConfigError(f"{name}={text}: expected a whole number from {least} on")


def _torchrun(options: argparse.Namespace, trainer_args: list[str]) -> int:
    isolate_restarts()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # its report of a failure is one line here, below
            logging.getLogger(name).setLevel(logging.CRITICAL)
    arguments = [
        f"--nproc-per-node={options.nproc_per_node}",
        f"--nnodes={options.nnodes}",
        f"--node-rank={options.node_rank}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={options.rdzv_endpoint or 'localhost:0'}",
        "--rdzv-id=titanlite",
        f"--max-restarts={options.max_restarts}",
        "-m", "titanlite.cli", "train", *trainer_args,
    ]  # fmt: skip
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 1
        print(
            f"titanlite: rank {rank} ended with {_describe(failure.exitcode)}; its message is above",
            file=sys.stderr,
        )
        return code
    except SignalException as error:
        print(f"titanlite: ended by signal {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
