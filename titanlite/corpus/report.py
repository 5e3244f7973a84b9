"""Report of a preparation: counts of documents read, removed and kept, and samples of removed documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from titanlite.data.text_files import Document, where
from titanlite.storage import parse_path

Place = tuple[PurePath, int]  # a document's file and position, the arguments of corpus.where()
SAMPLES = 5  # per filter
EXCERPT = 200  # characters per sample


class Report:
    """Counts of documents, characters and tokens in one split. `tree` has the structure of report.json."""

    def __init__(self, filters: Sequence[str]):
        self.tree: dict[str, Any] = {
            "read": {"documents": 0, "characters": 0},
            "bad_lines": {"documents": 0, "samples": []},
            "filters": [{"name": n, "documents": 0, "characters": 0, "samples": []} for n in filters],
            "kept": {"documents": 0, "characters": 0, "tokens": 0},
        }

    def read(self, document: Document) -> None:
        """Count a document that was read."""
        _count(self.tree["read"], document)

    def unread(self, document: Document) -> None:
        """Take back a document that was read: it is counted as a bad line."""
        _count(self.tree["read"], document, -1)

    def bad(self, file: PurePath, place: int, reason: str) -> None:
        """Count a line or row that could not be read."""
        self.tree["bad_lines"]["documents"] += 1
        _sample(self.tree["bad_lines"], {"where": (str(file), place), "reason": reason})

    def removed(self, index: int, document: Document, reason: str, original: Place | None = None) -> None:
        """Count a document that filter `index` removed. `original`: the document that it duplicates."""
        entry = self.tree["filters"][index]
        _count(entry, document)
        if self.wants_sample(index):
            sample = {"where": (str(document.file), document.place), "reason": reason}
            if original:
                sample["original"] = (str(original[0]), original[1])
            _sample(entry, sample | {"text": document.text[:EXCERPT]})

    def wants_sample(self, index: int) -> bool:
        """Return whether filter `index` has fewer than SAMPLES samples. If not, no reason is needed."""
        return len(self.tree["filters"][index]["samples"]) < SAMPLES

    def kept(self, document: Document, num_tokens: int) -> None:
        """Count a document that is written to the dataset."""
        _count(self.tree["kept"], document)
        self.tree["kept"]["tokens"] += num_tokens


def _count(entry: dict[str, Any], document: Document, by: int = 1) -> None:
    entry["documents"] += by
    entry["characters"] += by * len(document.text)


def _sample(entry: dict[str, Any], sample: Any) -> None:
    if len(entry["samples"]) < SAMPLES:
        entry["samples"].append(sample)


def merge(trees: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of reports, with the first samples."""
    total, *others = trees
    for other in others:
        _add(total, other)
    return total


def _add(a: Any, b: Any) -> None:
    for key in a if isinstance(a, dict) else range(len(a)):
        if key == "samples":
            a[key] = [*a[key], *b[key]][:SAMPLES]
        elif isinstance(a[key], int):
            a[key] += b[key]
        elif not isinstance(a[key], str):
            _add(a[key], b[key])


def located(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a merged report with the places of its samples as text. This is done last, because counting
    lines reads a file up to the sample."""
    for entry in (tree["bad_lines"], *tree["filters"]):
        for sample in entry["samples"]:
            sample["where"] = where(parse_path(sample["where"][0]), sample["where"][1])
            if original := sample.pop("original", None):
                sample["reason"] += f" {where(parse_path(original[0]), original[1])}"
    return tree


def summary(tree: dict[str, Any]) -> str:
    """Return the report as a table, one line per filter."""
    read = tree["read"]
    filters = [(f["name"], f, "-" if f["documents"] else "") for f in tree["filters"]]
    rows = [("read", read, ""), *filters, ("kept", tree["kept"], "")]
    width = max(len(name) for name, *_ in rows)
    lines = [f"{'':{width}}  {'documents':>16}  {'characters':>20}  share of documents"]
    for name, entry, sign in rows:
        documents, characters = f"{sign}{entry['documents']:,}", f"{sign}{entry['characters']:,}"
        share = entry["documents"] / max(read["documents"], 1)
        lines.append(f"{name:{width}}  {documents:>16}  {characters:>20}  {sign}{share:.2%}")
    if bad := tree["bad_lines"]["documents"]:
        first = tree["bad_lines"]["samples"][0]
        lines.append(f"{bad:,} bad lines were skipped; the first: {first['where']}: {first['reason']}")
    return "\n".join(lines)
