"""Write a report on one or several runs: one HTML file with verdicts, charts, samples and changed keys.

The first run is the one that the others are compared with. docs/report.md says what each verdict means.
"""

from __future__ import annotations

from collections.abc import Sequence

from titanlite import commands
from titanlite.config.paths import check_output_file
from titanlite.files import write_atomically
from titanlite.log import tell
from titanlite.report.page import report
from titanlite.report.recorded_run import names_of, read_run


def main(argv: Sequence[str]) -> int:
    """Write the report."""
    options = commands.parser("report").read(argv)
    check_output_file(options.output)
    runs = [read_run(folder, name) for folder, name in zip(options.runs, names_of(options.runs))]
    write_atomically(options.output, report(runs, options.price_per_gpu_hour))
    for run in runs:
        for problem in run.problems:
            tell(f"{run.name}: {problem}")
    print(options.output)
    return 0
