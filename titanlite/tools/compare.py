"""Compare runs on the terminal: verdicts, losses at equal tokens, times, and the keys that differ.

The first run is the one that the others are compared with. `titanlite report` writes the long form.
"""

from __future__ import annotations

from collections.abc import Sequence

from titanlite import commands
from titanlite.config.component import ConfigError
from titanlite.report.recorded_run import names_of, read_run
from titanlite.report.terminal import comparison


def main(argv: Sequence[str]) -> int:
    """Print the comparison."""
    options = commands.parser("compare").read(argv)
    if len(options.runs) < 2:
        raise ConfigError("name at least two runs; `titanlite report RUN` reports on one")
    runs = [read_run(folder, name) for folder, name in zip(options.runs, names_of(options.runs))]
    print(comparison(runs, options.price_per_gpu_hour), end="")
    return 0
