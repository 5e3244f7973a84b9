"""The logger: one line an event, with time and rank. Nothing else in titanlite sets up logging.

By default rank 0 reports progress and every rank reports warnings and errors.
"""

from __future__ import annotations

import logging
import sys
import warnings

logger = logging.getLogger("titanlite")


def set_up_logging(rank: int, verbose: bool) -> None:
    """Log to standard error with the rank in front; quiet ranks report only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[rank{rank}] %(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    # Said by libraries about choices made here on purpose; each is named, so that nothing else is hidden.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # A norm over a mesh of two axes takes two all-reduces of one number.
    redistribute = logging.getLogger("torch.distributed.tensor._redistribute")
    redistribute.addFilter(lambda record: "While redistributing from" not in record.getMessage())
