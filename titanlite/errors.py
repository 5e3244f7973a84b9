"""Errors that several layers raise, each with its exit code.

Other errors with an exit code: ConfigError (config/component.py), CheckpointError (checkpoint/commit.py),
OutOfMemory (metrics/memory.py), Stopped (runtime/signals.py)."""

from __future__ import annotations

import errno
import re

# Errors of gloo, NCCL and torch's stores on a rank whose peer has ended or does not answer.
PEER_ERRORS = re.compile(
    "Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|NCCL|Dist[A-Z][a-z]+Error"
)
TRACEBACK = "traceback"  # start of the name of a rank's traceback of such an error in the launcher's folder


class Diverged(RuntimeError):
    """Training cannot continue: losses, gradients or weights are not finite, or the loss has spiked and
    guard.on_spike ends the run. Starting the run again without a change may end it again."""

    exit_code = 4


class SilentFault(RuntimeError):
    """A GPU computes wrong numbers without an error. The next start resumes from a checkpoint that was saved
    before, but a broken GPU computes wrong numbers again."""

    exit_code = 6


class LoaderError(RuntimeError):
    """A loader worker has died or delivers no batches. Starting the run again resumes from its last
    checkpoint."""

    exit_code = 1


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether an error means that the machine's memory is used up, or that this process has reached its limit
    of memory. An error with the attribute `exit_code` does not."""
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    is_memory = isinstance(error, MemoryError) or refused or "DefaultCPUAllocator: " in str(error)
    return is_memory and not hasattr(error, "exit_code")


def explain_host_memory(where: str, error: BaseException) -> str:
    """The message for an error of is_out_of_host_memory, in one line. `where`: in the run; may be empty."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    remedy = "`titanlite plan CONFIG` says how much a run needs; `ulimit -v` shows a limit of this process"
    return f"out of this machine's memory{where}: {reason}; {remedy}"
