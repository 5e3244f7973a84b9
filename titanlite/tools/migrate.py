"""`titanlite migrate torchtitan.toml -o titanlite.toml`: torchtitan's configuration as titanlite's, with a
report of what became of each key: carried over, renamed, replaced, or without counterpart.

What torchtitan would have taken for a key that the file lacks is written, where titanlite would take another
value. What the file cannot say, such as where the text is, stands at the top of the result. A value that
titanlite refuses is left out, and told.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomli_w

from titanlite.commands import parser
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.paths import check_new
from titanlite.files import write_atomically
from titanlite.tools.migrate_rules import (
    Line,
    Migration,
    add_defaults,
    add_model,
    add_required,
    check,
    flatten,
    nested,
    set_float8_layers,
    set_max_position,
    set_micro_batches,
    set_recomputed_blocks,
    set_warmup,
)
from titanlite.tools.torchtitan import ERAS, NOTES, NOTES_ON_KEYS, Made

KINDS = ("carried over", "renamed", "replaced", "default", "no counterpart", "unknown")


def main(argv: Sequence[str]) -> int:
    """Write the configuration, and the report: beside a file to standard output, else to standard error."""
    options = parser("migrate").read(argv)
    if options.output is not None:
        check_new(options.output, "--output")
    text, report = migrate(options.source)
    if options.output is None:
        print(text, end="")
    else:
        try:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(options.output, text)
        except OSError as e:
            raise ConfigError(f"{options.output} cannot be written: {e.strerror}") from None
    print(report, end="", file=sys.stderr if options.output is None else sys.stdout)
    return 0


def migrate(source: Path) -> tuple[str, str]:
    """The TOML text and the report. Raises ConfigError for a file that is none of torchtitan's, or a model
    that titanlite does not have."""
    tree, _ = toml.read(source)
    theirs = dict(flatten(tree))
    if "data.sources" in theirs:  # every job of titanlite's has it, no file of torchtitan's does
        raise ConfigError(f"{source} is a titanlite file already: `titanlite config {source}` checks it")
    m = Migration(theirs, era(theirs))
    add_model(m, source)
    # a path stands for what another key names: of a data set, of a tokenizer
    for key, value in sorted(
        theirs.items(), key=lambda item: item[0].endswith(("dataset_path", "tokenizer_path"))
    ):
        if key in ("model.name", "model.flavor"):
            continue
        line, found = became(key, value)
        if key.startswith("validation.dataset") and not _validates(theirs):
            line, found = Line(key, "no counterpart", note="validation is off"), {}
        m.lines.append(line)
        m.made |= found
    add_required(m)
    drop_refused(m)
    add_defaults(m)
    set_warmup(m)
    set_micro_batches(m)
    set_float8_layers(m)
    set_max_position(m)
    set_recomputed_blocks(m)
    drop_refused(m)
    check(m)
    notes = [[line.note, NOTES_ON_KEYS.get(line.key, "")] for line in m.lines]
    lines = [line._replace(note="; ".join(filter(None, n))) for line, n in zip(m.lines, notes)]
    head = [
        f"# From {source.name} of torchtitan {m.era}, by titanlite migrate.",
        *(f"# TO DO: {t}" for t in m.todo),
    ]
    text = "\n".join(head) + "\n\n" + tomli_w.dumps(nested(m.made))
    end = [*(f"NOTE: {note}" for note in NOTES), *(f"TO DO: {t}" for t in m.todo)]
    return text, "\n".join([f"{source}: torchtitan {m.era}", *table(lines), *end]) + "\n"


def _validates(theirs: Made) -> bool:
    return bool(theirs.get("validation.enable") or theirs.get("validation.enabled"))


def era(theirs: Made) -> str:
    """The release, by the keys that only one has."""
    own = [name for name in ("0.1", "0.2") if any(_is_in(name, key) for key in theirs)]
    return own[0] if len(own) == 1 else "between 0.1 and 0.2" if own else "0.1 or 0.2"


def _is_in(name: str, key: str) -> bool:
    keys = ERAS[name]
    gone = any(fnmatchcase(key, pattern) for pattern in keys.gone)
    return gone or key in {*keys.carried, *keys.renamed, *keys.replaced}


def became(key: str, value: Any) -> tuple[Line, Made]:
    """What becomes of one key, by the tables; exact names come before patterns."""
    for keys in ERAS.values():
        if key in keys.carried:
            return Line(key, "carried over"), {key: value}
        if key in keys.renamed:
            ours = keys.renamed[key]
            return Line(key, "carried over" if ours == key else "renamed", [ours]), {ours: value}
        if key in keys.replaced:
            make, note = keys.replaced[key]
            try:
                found = make(value)
            except (TypeError, AttributeError):
                return Line(key, "no counterpart", note=f"{value!r} is no value for it"), {}
            same = found == {key: value}
            return Line(key, "carried over" if same else "replaced", list(found), "" if same else note), found
    patterns = {pattern: why for keys in ERAS.values() for pattern, why in keys.gone.items()}
    for pattern in sorted(patterns, key=lambda pattern: "*" in pattern):
        if fnmatchcase(key, pattern):
            return Line(key, "no counterpart", note=patterns[pattern]), {}
    known = {k for keys in ERAS.values() for k in (*keys.carried, *keys.renamed, *keys.replaced, *keys.gone)}
    nearest = suggest(key, known).partition(" (known")[0].lstrip("; ")
    return Line(key, "unknown", note=f"no key of torchtitan 0.1 or 0.2{'; ' if nearest else ''}{nearest}"), {}


def drop_refused(m: Migration) -> None:
    """Leave out what titanlite does not accept, until the rest is a job. Raises ConfigError for what a job
    needs."""
    for _ in range(len(m.made)):
        try:
            m.job()
            return
        except ConfigError as refused:
            e = refused.errors[0]
            at = e.key or ""
            key = next((k for k in m.made if at == k or at.startswith(f"{k}.")), None)
            if key is None or key.startswith("model."):
                raise ConfigError(f"not a job of titanlite's: {e}", at) from None
            reason = str(e).rpartition(f"{at}: ")[2]
            where = next(i for i, line in enumerate(m.lines) if key in (line.key, *line.ours))
            m.lines[where] = Line(m.lines[where].key, "no counterpart", note=f"refused: {reason}")
            del m.made[key]


def table(lines: Sequence[Line]) -> list[str]:
    """The report, by kind."""
    found = []
    for kind in KINDS:
        of_kind = [line for line in lines if line.kind == kind]
        found += [f"{kind} ({len(of_kind)}):"] if of_kind else []
        for line in of_kind:
            to = ", ".join(line.ours) if list(line.ours) != [line.key] else ""
            found.append(f"  {line.key}{f' -> {to}' if to else ''}{f': {line.note}' if line.note else ''}")
    return found
