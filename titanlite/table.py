"""Tables on a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from titanlite.log import printable

MAX_CELL = 60  # characters


def table(rows: Sequence[Sequence[str]], num_texts: int | None = None) -> str:
    """Return rows of cells as lines with aligned columns; long cells are cut. `num_texts`: the columns after
    so many are numbers, which are aligned on the right; None: all columns are texts."""
    cells = [[_one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    texts = len(widths) if num_texts is None else num_texts
    lines = [
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _one_line(text: str) -> str:
    text = re.sub(r"\s+", " ", printable(text)).strip()
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."
