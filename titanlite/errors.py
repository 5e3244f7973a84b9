"""Errors that several layers raise, each with its exit code.

Other errors with an exit code: ConfigError (config/component.py), CheckpointError (checkpoint/commit.py),
OutOfMemory (metrics/memory.py), Stopped (runtime/signals.py)."""

from __future__ import annotations


class Diverged(RuntimeError):
    """Training cannot continue: losses, gradients or weights are not finite. Starting the run again would
    give the same result."""

    exit_code = 4


class LoaderError(RuntimeError):
    """A loader worker has died or delivers no batches. Starting the run again resumes from its last
    checkpoint."""

    exit_code = 1
