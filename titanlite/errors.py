"""Errors with an exit code of their own that several layers raise."""

from __future__ import annotations


class Diverged(RuntimeError):
    """Training cannot go on from this state: losses, gradients or weights are not finite. A restart would
    only repeat it."""

    exit_code = 4


class LoaderError(RuntimeError):
    """A loader worker died, or gives nothing any more. A restart goes on from the last checkpoint."""

    exit_code = 1
