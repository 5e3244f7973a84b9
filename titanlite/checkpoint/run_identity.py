"""The run identity: values that a resumed run must share with its checkpoint, such as the model's
architecture, the loss and the content of the data. Each value has a dotted key, such as `model.dim`.

The section `names` of a run identity is not compared. It has the names that messages use for the tokenizer
and, by fingerprint, for the data sources."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

from titanlite.checkpoint.state import listed
from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.data.skips import SkippedSequences
from titanlite.optim.base import CLIP_NORM
from titanlite.ranks import Ranks

STAGES, FIRST = "stages", "first_sequence"
NOT_COMPARED = ("names", STAGES)  # sections of a run identity; check_stages compares the stages
NUMBERING = ("training.", "data.")  # sections that decide which sequence has which number,
NOT_NUMBERING = "data.mask_documents"  # except this key, which only masks documents from each other
TOKENIZER, SOURCES, HELD_OUT = "data.tokenizer", "data.sources.", "data.held_out."
STREAMED = "streamed"  # in the section data: of a run on a stream
CLIP = "training.clip"
LORA = "lora"  # the table of adapters
OPTIMIZER = "optimizer"  # in allow_changed: the optimizer's state may differ; no key of the run identity
# Keys of the optimizer that add no state.
WITHOUT_STATE = tuple(f"optimizer.{key}" for key in ("lr", "weight_decay", "param_groups", "schedules"))
ABSENT = object()


def check_same_on_all_ranks(identity: dict[str, Any], skipped: SkippedSequences, ranks: Ranks) -> None:
    """Raises ConfigError on all ranks unless all ranks have the same run identity and skip the same
    sequences. `skipped`: data.skip_sequences. Collective."""
    own = {**identity, "data": {**identity["data"], "skip_sequences": skipped.as_lists()}}
    first = ranks.from_rank_zero(lambda: own)
    changes = [
        f"{key} is {spell(value)} on rank {ranks.rank}, {spell(known)} on rank 0"
        for key, known, value in differences(first, own)
    ]
    if found := ranks.first(changes or None):
        raise ConfigError(f"data, tokenizer or model differ: {listed(found, separator='; ')}")


def unknown_names(names: Sequence[str], *identities: dict[str, Any]) -> list[str]:
    """The mistakes in checkpoint.allow_changed, each as a sentence: names that are keys or tables of none of
    these run identities."""
    keys = [key for identity in identities for key in toml.flatten(identity) if not _covers("names", key)]
    known = {"data.sources" if key.startswith(SOURCES) else key for key in keys}
    return [
        f"the run identity has no key {name!r}{suggest(name, known)}"
        for name in names
        if name != OPTIMIZER and not any(_covers(name, key) for key in keys)
    ]


def check_identity(
    theirs: dict[str, Any],
    ours: dict[str, Any],
    allow_changed: Sequence[str],
    folder: PurePath,
    num_sequences: int = 0,
) -> list[str]:
    """The allowed differences between two run identities, each as a sentence.

    Raises ConfigError that names the differences unless `allow_changed` names their keys or tables. Keys that
    decide the numbers of sequences may not change after `num_sequences` > 0 sequences: some sequences would
    be trained on again and others left out. `folder`: the folder of the recorded run, for messages."""
    _check_stages(theirs, ours, num_sequences)
    changes = dict(_changes(theirs, ours))
    allowed = {key for key in changes if any(_covers(name, key) for name in allow_changed)}
    fixed = {key for key in changes if num_sequences and key.startswith(NUMBERING) and key != NOT_NUMBERING}
    other_model = any(key == TOKENIZER or key.startswith("model.") for key in changes)
    weights_fit = not other_model and LORA not in theirs  # adapters are no model to start from
    weights = f", with --checkpoint.initial_load_path={folder}" if num_sequences and weights_fit else ""
    remedy = f"Undo the change, or start a new run in another --job.dump_folder{weights}"
    stages = ""
    if all(f"{key}.".startswith(SOURCES) for key in fixed) and not ours.get("data", {}).get(STREAMED):
        first = f'the first with the sources\' weights until now and until = "{num_sequences} sequences"'
        stages = f"; to change the sources from here on, use [[stages]], {first}"
    if allowed & fixed:
        raise ConfigError(
            f"{_first(changes, allowed & fixed)}: after {num_sequences:,} sequences this run would train on "
            f"some of them again and leave others out. {remedy}{stages}",
            "checkpoint.allow_changed",
        )
    if num_sequences and (adapters := {key for key in changes if _covers(LORA, key)}):
        raise ConfigError(
            f"{folder} holds a run that differs: {_first(changes, adapters)}. A run cannot change the "
            f"layers, the rank and the alpha of its adapters, nor get or lose them. {remedy}",
            "job.dump_folder",
        )
    if refused := changes.keys() - allowed:
        advice = "; to change it within this run, name it in --checkpoint.allow_changed"
        raise ConfigError(
            f"{folder} holds a run that differs: {_first(changes, refused)}. {remedy}"
            f"{stages if refused & fixed else advice}",
            "job.dump_folder",
        )
    return list(dict.fromkeys(changes.values()))


def _check_stages(theirs: dict[str, Any], ours: dict[str, Any], num_sequences: int) -> None:
    """Raise ConfigError if a stage that has begun after `num_sequences` sequences begins elsewhere in this
    job or reads other sources, or if one that has ended has other settings. Later stages may change."""
    if STAGES not in theirs and STAGES not in ours:
        return  # `_changes` compares the sources
    before, now = (_begun(identity, num_sequences) for identity in (theirs, ours))
    stages = list(zip_longest(before, now, fillvalue=dict[str, Any]()))
    keys = [(i, FIRST) for i in range(len(stages))]  # before the settings, which follow from the places
    keys += [(i, key) for i, (a, b) in enumerate(stages) for key in [*a, *b]]
    for i, key in keys:
        a, b = (stage.get(key, ABSENT) for stage in stages[i])
        if a != b:
            raise _past_stage(i, key, (a, b), (theirs, ours), num_sequences)


def _past_stage(
    i: int, key: str, values: tuple[Any, Any], identities: tuple[dict[str, Any], ...], num_sequences: int
) -> ConfigError:
    """The error for stage `i`, which has other values of a key in two identities."""
    advice = "undo the change"
    if key == FIRST:
        begins = ["has not begun" if v is ABSENT else f"begins with sequence {v:,}" for v in values]
        said = f"stage {i + 1} of the run {begins[0]}; here it {begins[1]}"
        place = f"{num_sequences} sequences" if values[0] is ABSENT else f"{values[0]} sequences"
        advice = f'end stage {i} with until = "{place}"{" or later" if values[0] is ABSENT else ""}'
        i, key = i - 1, "until"
    elif key == "sources":
        said, key = f"stage {i + 1}: {_other_sources(values, identities)}", "weights"
    else:
        texts = [spell(value) for value in values]
        said = f"{key} of stage {i + 1} was {texts[0]}, is {texts[1]}"
        if "." in key and values[0] is not ABSENT:  # of a schedule; perhaps an amount, and another batch size
            advice += f", or set {texts[0]}: amounts are counted again at each start"
    said = f"{said}. The run is at sequence {num_sequences:,}, and only what comes later can change"
    return ConfigError(f"{said}: {advice}", f"{STAGES}.{i}.{key}")


def _other_sources(shares: tuple[Any, Any], identities: tuple[dict[str, Any], ...]) -> str:
    """Say how the shares of sources, by their fingerprints, differ between two identities."""
    old, new = (
        {_names(identity)[1].get(uid, uid): (uid, share) for uid, share in by_uid.items()}
        for by_uid, identity in zip(shares, identities)
    )
    if changed := [name for name in old if name in new and old[name][0] != new[name][0]]:
        return f"the sequences of {listed(changed)} have changed"
    texts = [", ".join(f"{n} {_percent(share)}" for n, (_, share) in named.items()) for named in (old, new)]
    return f"its sequences were {texts[0]}; here they are {texts[1]}"


def _begun(identity: dict[str, Any], num_sequences: int) -> list[dict[str, Any]]:
    """The stages that have begun after so many sequences, with dotted keys. The settings of the last of them
    may still change, and are left out."""
    stages = identity.get(STAGES) or [{FIRST: 0, "sources": identity["data"]["sources"]}]
    begun = [stage for stage in stages if stage[FIRST] < num_sequences]
    places = [{key: stage[key] for key in (FIRST, "sources")} for stage in begun]
    settings = [{key: value for key, value in stage.items() if key not in places[0]} for stage in begun[:-1]]
    return [
        place | toml.flatten(own) for place, own in zip_longest(places, settings, fillvalue=dict[str, Any]())
    ]


def with_source_labels(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A recorded run identity in the form that a job's identity has before its sources are opened: the list
    of source labels instead of shares by fingerprint. If the number of sources is the same, the labels are
    taken from `ours` and so not compared, because the data may have been moved. `ours` has no labels if they
    are not to be compared."""
    names, labels = _names(theirs)[1], ours["data"].get("sources")
    flat = toml.flatten({key: value for key, value in theirs.items() if key not in NOT_COMPARED})
    uids = [key.removeprefix(SOURCES) for key in flat if key.startswith(SOURCES)]
    known = {key: value for key, value in flat.items() if not key.startswith((SOURCES, HELD_OUT))}
    if labels is not None:
        same_number = len(uids) == len(labels)
        known["data.sources"] = labels if same_number else sorted(names.get(uid, uid) for uid in uids)
    return {**known, "names": theirs.get("names")}


def check_optimizer(checkpoint: PurePath, saved_toml: str, job_toml: str, misfits: Sequence[str]) -> None:
    """Raises ConfigError if the checkpoint's job has other settings of [optimizer] or another training.clip
    than this job, which may explain that tensors do not fit. `misfits`: differences of tensors, each a phrase
    that begins with the name of a tensor."""
    theirs, ours = (_optimizer_settings(toml.parse(text)) for text in (saved_toml, job_toml))
    texts = {
        key: f"{key} was {spell(before)}, is {spell(now)}"
        for key, before, now in differences(theirs, ours)
        if not any(_covers(name, key) for name in WITHOUT_STATE)
    }
    if CLIP in texts and all(phrase.partition(" ")[0].endswith(f".{CLIP_NORM}") for phrase in misfits):
        texts = {CLIP: texts[CLIP]}
    if not texts:
        return
    difference = f"other optimizer state: {', '.join(texts.values())}"
    if "optimizer.name" in texts:
        names = [settings["optimizer"].get("name") for settings in (theirs, ours)]
        difference = f"optimizer {names[0]}, this job has {names[1]}"
    allow = f' name "{OPTIMIZER}" in --checkpoint.allow_changed to start state that differs at zero,'
    if CLIP in texts:  # allow_changed does not cover the clipper's state
        allow = ""
    raise ConfigError(
        f"{checkpoint} was saved with {difference}. Undo the change,{allow} or start a new run from "
        f"the weights, in another --job.dump_folder, with --checkpoint.initial_load_path={checkpoint}",
        next(iter(texts)) if len(texts) == 1 else "optimizer.name",
    )


def _optimizer_settings(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"optimizer": job.get("optimizer", {}), "training": {"clip": job.get("training", {}).get("clip")}}


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) for each difference of two nested tables. The value is ABSENT
    where a table does not have the key."""
    old, new = toml.flatten(before), toml.flatten(now)
    for key in new | old:
        a, b = old.get(key, ABSENT), new.get(key, ABSENT)
        if a is ABSENT or b is ABSENT or a != b:
            yield key, a, b


def spell(value: Any) -> str:
    """A value in TOML syntax, for messages."""
    return "absent" if value is ABSENT else json.dumps(value, ensure_ascii=False, default=str)


def _changes(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, sentence) for each difference. Differences of sources come last. A source whose content
    has changed is two differences, because its fingerprint has changed, with one sentence."""
    (old, old_names), (new, new_names) = _names(theirs), _names(ours)
    before, now = (
        {k: v for k, v in identity.items() if k not in NOT_COMPARED} for identity in (theirs, ours)
    )
    names = old_names | new_names
    for key, a, b in sorted(differences(before, now), key=lambda change: change[0].startswith(SOURCES)):
        if key.startswith(SOURCES):
            name = names.get(uid := key.removeprefix(SOURCES), uid)
            in_both = name in old_names.values() and name in new_names.values()
            if in_both and ABSENT in (a, b):
                yield key, f"the sequences of {name} have changed"
            elif STREAMED in before.get("data", {}) and STREAMED in now.get("data", {}):
                was, is_now = (listed(list(known.values())) for known in (old_names, new_names))
                yield key, f"the run reads {was}, this job reads {is_now}"
            else:
                yield key, f"{name} was {_percent(a)} of the sequences, is {_percent(b)}"
        elif key.startswith(HELD_OUT):
            yield (
                HELD_OUT,
                "data.holdout_sequences are split over the sources by other weights of data.sources",
            )
        elif key == TOKENIZER and old and new:
            same_name = f"the tokenizer {new} has changed"
            yield key, same_name if old == new else f"the tokenizer was {old}, is {new}"
        else:
            yield key, f"{key} was {spell(a)}, is {spell(b)}"


def _percent(share: Any) -> str:
    """A source's share of the sequences, in thousandths, for messages."""
    return f"{0 if share is ABSENT else share / 10:g}%"


def _names(identity: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The tokenizer's name, and the sources' names by fingerprint; empty if the identity has no names."""
    names = identity.get("names") or {}
    return names.get("tokenizer", ""), names.get("sources", {})


def _covers(name: str, key: str) -> bool:
    """Whether a name in checkpoint.allow_changed is this key or a table that contains it."""
    return key == name or key.startswith(f"{name}.")


def _first(changes: dict[str, str], keys: Collection[str]) -> str:
    """The first sentences about these keys, on one line."""
    return listed(list(dict.fromkeys(text for key, text in changes.items() if key in keys)), separator="; ")
