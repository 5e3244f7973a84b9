"""Code on the pages of docs/ that is quoted from files: a comment `<!-- path -->` is followed by that file.

`python -m tests.support.quoted_code` writes the files' content into the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/extending.md", ROOT / "docs/models.md"]
QUOTE = re.compile(r"(<!-- (\S+\.py) -->\n)(?:\n```python\n.*?\n```\n)?", re.DOTALL)


def refreshed(page: str) -> str:
    """The page with the present content of the files that it quotes."""

    def quote(match: re.Match[str]) -> str:
        return f"{match[1]}\n```python\n{(ROOT / match[2]).read_text(encoding='utf-8').strip()}\n```\n"

    return QUOTE.sub(quote, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
