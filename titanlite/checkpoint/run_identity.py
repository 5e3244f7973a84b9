"""The run identity: values by dotted name that a resumed run must share with its checkpoint, such as the
model's architecture, the loss and the content of the data.

The section `names` of a run identity is not compared: it has the names that messages use for the tokenizer
and, by fingerprint, for the sources."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.json_file import read_object

NUMBERING = ("training.", "data.")  # sections that decide which sequence has which number ...
NOT_NUMBERING = "data.mask_documents"  # ... except this key, which only masks documents from each other
TOKENIZER, SOURCES = "data.tokenizer", "data.sources."
REPACKING = (TOKENIZER, "data.packing", "training.seq_len")
SHOWN = 3  # differences named in one message
ABSENT = object()


def read_identity(path: Path) -> dict[str, Any]:
    """Read the run_identity.json of a run folder. Raises ConfigError if it is damaged."""
    try:
        return read_object(path)
    except ConfigError as e:
        raise ConfigError(f"{e}; the run has no checkpoint, so the file can be deleted") from None


def check_allowed(names: Sequence[str], identity: dict[str, Any]) -> None:
    """Raises ConfigError for a name in checkpoint.allow_changed that a new run's identity does not have. A
    run that resumes may also name keys that only its checkpoint has."""
    keys = flatten({key: value for key, value in identity.items() if key != "names"})
    for name in names:
        if not any(_covers(name, key) for key in keys):
            known = {"data.sources" if key.startswith(SOURCES) else key for key in keys}
            raise ConfigError(
                f"the run identity has no key {name!r}{suggest(name, known)}", "checkpoint.allow_changed"
            )


def check_identity(
    theirs: dict[str, Any],
    ours: dict[str, Any],
    allow_changed: Sequence[str],
    where: Path,
    num_sequences: int = 0,
) -> list[str]:
    """The allowed differences between two run identities, each as a sentence.

    Raises ConfigError that names the differences unless `allow_changed` names their keys or tables. Keys that
    decide the numbers of sequences may not change once `num_sequences` were trained on: some sequences would
    be trained on again and others left out. `where`: the folder of the recorded run, for messages."""
    changes = dict(_changes(theirs, ours))
    named = {key for key in changes if any(_covers(a, key) for a in allow_changed)}
    fixed = {key for key in changes if num_sequences and key.startswith(NUMBERING) and key != NOT_NUMBERING}
    fits = not any(key == TOKENIZER or key.startswith("model.") for key in changes)
    weights = f", with --checkpoint.initial_load_path={where}" if num_sequences and fits else ""
    if named & fixed:
        raise ConfigError(
            f"{_first(changes, named & fixed)}: after {num_sequences:,} sequences this run would train on "
            "some of them again and leave others out. Undo the change, or start a new run in another "
            f"--job.dump_folder{weights} (changing the data within a run is not "
            "supported yet)",
            "checkpoint.allow_changed",
        )
    if refused := changes.keys() - named:
        allow = (
            "" if refused & fixed else "; to change it within this run, name it in --checkpoint.allow_changed"
        )
        raise ConfigError(
            f"{where} holds a run that differs: {_first(changes, refused)}. Undo the change, start a new "
            "run in "
            f"another --job.dump_folder{weights}, or restart at step 1 in this one with "
            "--checkpoint.restart=true"
            f"{allow}",
            "job.dump_folder",
        )
    return list(changes.values())


def before_opening(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A recorded run identity in the form that a job has before its sources are opened, with sources listed
    by label. If both have the same number of sources, the labels are not compared: data may have been
    moved."""
    names, labels = _names(theirs)[1], ours["data"]["sources"]
    flat = flatten({key: value for key, value in theirs.items() if key != "names"})
    uids = [key.removeprefix(SOURCES) for key in flat if key.startswith(SOURCES)]
    known = {key: value for key, value in flat.items() if not key.startswith(SOURCES)}
    before = labels if len(uids) == len(labels) else sorted(names.get(uid, uid) for uid in uids)
    return {**known, "data.sources": before, "names": theirs.get("names")}


def check_optimizer(checkpoint: Path, job_toml: str) -> None:
    """Raises ConfigError if the checkpoint's job has another [optimizer] than this job, which explains why
    its tensors differ."""
    saved = toml.read(checkpoint / "job.toml")[0].get("optimizer", {})
    ours = toml.parse(job_toml).get("optimizer", {})
    name, changes = saved.get("name"), list(differences(saved, ours))
    if name != ours.get("name"):
        what = f"with optimizer {name}, this job has {ours.get('name')}"
    else:
        said = ", ".join(f"optimizer.{key} was {spell(a)}, is {spell(b)}" for key, a, b in changes)
        what = f"with other optimizer state: {said}"
    if changes:
        raise ConfigError(
            f"{checkpoint} was saved {what}. Undo the change, or start a new run from the weights, in "
            "another "
            f"--job.dump_folder, with --checkpoint.initial_load_path={checkpoint}",
            "optimizer.name",
        )


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) where two trees differ; ABSENT for a key that only one of them
    has."""
    old, new = flatten(before), flatten(now)
    for key in [*new, *(key for key in old if key not in new)]:
        a, b = old.get(key, ABSENT), new.get(key, ABSENT)
        if a is ABSENT or b is ABSENT or a != b:
            yield key, a, b


def spell(value: Any) -> str:
    """A value as TOML spells it, for messages."""
    return "absent" if value is ABSENT else json.dumps(value, ensure_ascii=False, default=str)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table with dotted keys; tables in lists are numbered from 0."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _changes(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, sentence about it) for each difference; the sources come last."""
    (old, old_names), (new, new_names) = _names(theirs), _names(ours)
    before, now = ({k: v for k, v in identity.items() if k != "names"} for identity in (theirs, ours))
    shares: dict[str, tuple[Any, Any]] = {}
    for key, a, b in differences(before, now):
        if key.startswith(SOURCES):
            shares[key.removeprefix(SOURCES)] = a, b
        elif key == TOKENIZER and old and new:
            changed = (
                f"the tokenizer {new} has changed" if old == new else f"the tokenizer was {old}, is {new}"
            )
            yield key, changed
        else:
            yield key, f"{key} was {spell(a)}, is {spell(b)}"
    # The fingerprints of all sources change with the tokenizer and with the packing.
    is_explained = any(_at(before, key) != _at(now, key) for key in REPACKING)
    yield from _source_changes(shares, old_names, new_names, is_explained)


def _source_changes(
    shares: dict[str, tuple[Any, Any]],
    old_names: dict[str, str],
    new_names: dict[str, str],
    is_explained: bool,
) -> Iterator[tuple[str, str]]:
    """(dotted key, sentence about it) for each source that differs. `shares`: the source's thousandths of all
    sequences before and now, by fingerprint."""
    gone = {old_names.get(uid, uid): uid for uid, (_, b) in shares.items() if b is ABSENT}
    for uid, (a, b) in shares.items():
        name, key = (old_names if b is ABSENT else new_names).get(uid, uid), f"{SOURCES}{uid}"
        if a is not ABSENT and b is not ABSENT:
            yield key, f"{name} was {a / 10:g}% of the sequences, is {b / 10:g}%"
        elif a is not ABSENT:
            if name in gone:
                yield key, f"{name} was {a / 10:g}% of the sequences, is no source now"
        elif gone.pop(name, None) is None:
            yield key, f"{name} is a new source, {b / 10:g}% of the sequences"
        elif not is_explained:
            yield key, f"the content of {name} has changed"


def _names(identity: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The names of the tokenizer and of the sources by fingerprint; empty if the run identity does not have
    them."""
    names = identity.get("names")
    sources = names.get("sources") if isinstance(names, dict) else None
    if not isinstance(names, dict) or not isinstance(sources, dict):
        return "", {}
    return str(names.get("tokenizer", "")), {uid: str(name) for uid, name in sources.items()}


def _covers(name: str, key: str) -> bool:
    """Whether a name in checkpoint.allow_changed is the key, or a table that contains the key."""
    return key == name or key.startswith(f"{name}.")


def _at(tree: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return tree.get(section, {}).get(name)


def _first(changes: dict[str, str], keys: Collection[str]) -> str:
    """The first sentences about these keys, on one line."""
    said = [text for key, text in changes.items() if key in keys]
    return "; ".join(said[:SHOWN]) + (f" (and {len(said) - SHOWN} more)" if len(said) > SHOWN else "")
