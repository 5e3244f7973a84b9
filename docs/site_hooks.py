"""What mkdocs does with links from docs/ to the rest of the repository, which is not part of the site.

Pictures of assets/ are copied into the site. Other links become their text. A link to a file that does not
exist is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures of assets/ to the site."""
    for picture in sorted((ROOT / "assets").glob("*.*g")):
        files.append(File.generated(config, f"assets/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links of a page to files outside docs/."""

    def replace(match: re.Match[str]) -> str:
        is_picture, text, path = match.groups()
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} links to ../{path}, which does not exist")
        return f"![{text}]({path})" if is_picture else text

    return LINK.sub(replace, markdown)
