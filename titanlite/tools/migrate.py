"""`titanlite migrate torchtitan.toml -o titanlite.toml`: torchtitan's configuration as titanlite's, with a
report of what became of each key: carried over, renamed, replaced, or without counterpart.

What torchtitan would have taken for a key that the file lacks is written, where titanlite would take another
value. What the file cannot say, such as where the text is, stands at the top of the result. A value that
titanlite refuses is left out, and told.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from titanlite.commands import parser
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.places import Locator
from titanlite.job import Job, check_new
from titanlite.tools.torchtitan import DEFAULTS, ERAS, FLAVORS, MASKING, Made, text_source, tokenizer

KINDS = ("carried over", "renamed", "replaced", "default", "no counterpart", "unknown")


class Line(NamedTuple):
    """What became of one key. `ours`: the keys that it set."""

    key: str
    kind: str
    ours: Sequence[str] = ()
    note: str = ""


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
            with open(options.output, "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as e:
            raise ConfigError(f"{options.output} cannot be written: {e.strerror}") from None
    print(report, end="", file=sys.stderr if options.output is None else sys.stdout)
    return 0


def migrate(source: Path) -> tuple[str, str]:
    """The TOML text and the report. Raises ConfigError for a file that is none, or a model that titanlite
    does not have."""
    tree, _ = toml.read(source)
    theirs = dict(flatten(tree))
    lines, made = model(theirs, source)
    # a data set's path after its name, which stands for another path
    for key, value in sorted(theirs.items(), key=lambda item: item[0].endswith("dataset_path")):
        if key in ("model.name", "model.flavor"):
            continue
        line, found = became(key, value)
        if key.startswith("validation.dataset") and not _validates(theirs):
            line, found = Line(key, "no counterpart", note="validation is off"), {}
        lines.append(line)
        made |= found
    todo = add_defaults(lines, made)
    drop_refused(lines, made)
    lengthen(lines, made)
    todo += cross_checks(made)
    head = [
        f"# From {source.name} of torchtitan {era(theirs)}, by titanlite migrate.",
        *(f"# TO DO: {t}" for t in todo),
    ]
    text = "\n".join(head) + "\n\n" + tomli_w.dumps(nested(made))
    report = [f"{source}: torchtitan {era(theirs)}", *table(lines), *(f"TO DO: {t}" for t in todo)]
    return text, "\n".join(report) + "\n"


def _validates(theirs: Made) -> bool:
    return bool(theirs.get("validation.enable") or theirs.get("validation.enabled"))


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(made: Made) -> dict[str, Any]:
    """The tree of dotted keys, sections in titanlite's order."""
    sections = [f.name for f in dataclasses.fields(Job)]
    tree: dict[str, Any] = {section: {} for section in sections}
    for key, value in made.items():
        *parents, leaf = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return {section: found for section, found in tree.items() if found}


def era(theirs: Made) -> str:
    """The release, by the keys that only one has."""
    own = [name for name in ("0.1", "0.2") if any(_is_in(name, key) for key in theirs)]
    return own[0] if len(own) == 1 else "between 0.1 and 0.2" if own else "0.1 or 0.2"


def _is_in(name: str, key: str) -> bool:
    keys = ERAS[name]
    exact = {*keys.carried, *keys.renamed, *keys.replaced, *(k for k in keys.gone if "*" not in k)}
    return key in exact


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


def model(theirs: Made, source: Path) -> tuple[list[Line], Made]:
    """The family and its flavor, which every job needs."""
    name, flavor = theirs.get("model.name", "llama3"), theirs.get("model.flavor", "debugmodel")
    if name not in FLAVORS:
        raise ConfigError(f"{source}: model.name = {name!r}: titanlite has {' and '.join(FLAVORS)}")
    plain, masks = flavor, False
    for ending in MASKING:
        if str(flavor).endswith(ending):
            plain, masks = flavor.removesuffix(ending), True
            break
    if plain not in FLAVORS[name]:
        raise ConfigError(f"{source}: model.flavor = {flavor!r}{suggest(str(flavor), FLAVORS[name])}")
    ours, overrides = FLAVORS[name][plain]
    made: Made = {"model.name": name, "model.flavor": ours, "model.overrides": dict(overrides)}
    notes = []
    if name == "llama3" and era(theirs) == "0.1":
        made["model.overrides"]["rope_factor"] = 1.0
        notes.append("its rotary embedding was not scaled")
    if masks:
        made["data.mask_documents"] = True
        notes.append("documents are masked from each other")
    if overrides:
        notes.append("its shape by overrides")
    same = ours == flavor and not notes
    kinds = ["carried over" if key in theirs else "default" for key in ("model.name", "model.flavor")]
    kinds[1] = kinds[1] if same or "model.flavor" not in theirs else "replaced"
    return [
        Line("model.name", kinds[0]),
        Line(
            "model.flavor",
            kinds[1],
            [] if same else [key for key in made if key != "model.name"],
            "; ".join(notes),
        ),
    ], made


def add_defaults(lines: list[Line], made: Made) -> list[str]:
    """Write what the file leaves to torchtitan's defaults, where ours are others. Returns what the file
    cannot say."""
    todo = []
    defaults = dict(DEFAULTS)
    steps = made.get("training.steps", 10000)  # torchtitan clamps a longer warmup
    if isinstance(steps, int):
        defaults["lr_scheduler.warmup_steps"] = min(defaults["lr_scheduler.warmup_steps"], max(steps - 1, 0))
    if made.get("float8.enable"):
        defaults["float8.enable_fsdp_float8_all_gather"] = False
    if made.get("validation.enable"):
        defaults["validation.freq"] = 10
        if "data.validation_sources" not in made:
            defaults |= text_source("data.validation_sources")("c4_validation")
    if "tokenizer" not in made:
        defaults |= tokenizer("./tests/assets/tokenizer")
        todo.append("tokenizer.path: the file names none; this is torchtitan's own test tokenizer")
    if "data.sources" not in made:
        defaults |= text_source("data.sources")("c4_test")
    for key, value in defaults.items():
        if key not in made:
            made[key] = value
            lines.append(Line(key, "default", note="torchtitan's, which the file leaves out"))
    for key in ("data.sources", "data.validation_sources"):
        for found in made.get(key, []):
            todo.append(
                f"{key}: put the text in {found['path'][0]}, or name other files; nothing is downloaded"
            )
    return todo


def drop_refused(lines: list[Line], made: Made) -> None:
    """Leave out what titanlite does not accept, until the rest is a job. Raises ConfigError for what a job
    needs."""
    for _ in range(len(made)):
        try:
            toml.build(Job, nested(made), Locator("", ""))
            return
        except ConfigError as refused:
            e = refused.errors[0]
            at = e.key or ""
            key = next((k for k in made if at == k or at.startswith(f"{k}.")), None)
            if key is None or key.startswith("model."):
                raise ConfigError(f"not a job of titanlite's: {e}", at) from None
            reason = str(e).rpartition(f"{at}: ")[2]
            where = next(i for i, line in enumerate(lines) if key in (line.key, *line.ours))
            lines[where] = Line(lines[where].key, "no counterpart", note=f"refused: {reason}")
            del made[key]


def lengthen(lines: list[Line], made: Made) -> None:
    """Let the model take the file's sequences where its flavor is made for shorter ones: torchtitan does."""
    job = toml.build(Job, nested(made), Locator("", ""))
    limit, seq_len = job.model.max_position, job.training.seq_len
    if limit is not None and seq_len > limit:
        made["model.overrides"]["max_position"] = seq_len
        note = f"the flavor is made for {limit} tokens"
        lines.append(Line("model.overrides.max_position", "default", note=note))


def cross_checks(made: Made) -> list[str]:
    """What titanlite would say to the whole of it when it is started on as few ranks as it is for."""
    job = toml.build(Job, nested(made), Locator("", ""))
    ranks = job.parallelism.fewest_ranks
    try:
        job.check(ranks)
    except ConfigError as e:
        return [f"{e.key or ''}: on {ranks} ranks titanlite refuses this: {e}"]
    return []


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
