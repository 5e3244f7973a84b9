"""`titanlite migrate torchtitan.toml -o titanlite.toml`: translate a configuration of torchtitan to
titanlite's keys: a TOML file of 0.1 or 0.2, or the JSON that 0.3's trainer writes with
`--debug.save_config_file=NAME`.

Comments at the top of the result list every key: carried over, renamed, converted or without a counterpart.
`TO DO` lines name the decisions that are left to you, because a wrong guess would change the training
silently.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from titanlite.commands import parser
from titanlite.config import schema, toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.locator import Locator
from titanlite.config.overrides import put
from titanlite.config.paths import check_new
from titanlite.contrib import torchtitan_json
from titanlite.contrib import torchtitan_keys as tables
from titanlite.contrib.torchtitan_keys import Values
from titanlite.files import write_atomically
from titanlite.job import Job
from titanlite.tools.config import build_on_meta

WEIGHT_DECAY = "optimizer.weight_decay: titanlite does not decay norms; optimizer.param_groups can change it"
ROPE = (
    "model.overrides.rope_factor: torchtitan has 8.0 since 8 October 2025 (0.2.0); set 1.0 for an older "
    "version, which does not scale Llama's rotary embedding"
)
VOCABULARY = (
    "model.overrides.vocab_size: torchtitan 0.1 uses the tokenizer's vocabulary size; set this number if it "
    "differs from the flavor's"
)
EXPERTS = (
    "moe.load_balance: torchtitan 0.2.2 never balances the experts of its qwen3, although it saves a bias "
    "for it, and 'none' is the same; titanlite's default, 'global', balances them"
)
PIPELINE = (
    "training.local_batch_size: torchtitan splits a rank's batch into micro-batches of "
    "pipeline_parallel_microbatch_size; set local_batch_size to that size, and global_batch_size to the old "
    "local_batch_size x the number of data-parallel ranks"
)


def main(argv: Sequence[str]) -> int:
    """Write the configuration, and print which keys have a TO DO line."""
    options = parser("migrate").read(argv)
    if options.output is not None:
        check_new(options.output, "--output")
    text, todo = migrate(options.source)
    keys = ", ".join(dict.fromkeys(line.split(":")[0].split(" ")[0] for line in todo))
    report = f"{options.source}: migrated; its TO DO lines ask for decisions on {keys}"
    if options.output is None:
        print(text, end="")
        print(report, file=sys.stderr)
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, text)
    print(report)
    return 0


def migrate(source: Path) -> tuple[str, list[str]]:
    """Return the TOML text and its TO DO lines. Raises ConfigError for a file that is not torchtitan's, and
    for a model that titanlite does not have."""
    if config := torchtitan_json.read(source):
        theirs, ours, comments, todo = torchtitan_json.settings(config, source)
    else:
        tree, _ = toml.read(source)
        if "data" in tree:  # a section of titanlite that torchtitan does not have
            raise ConfigError(f"{source} is already a titanlite file: `titanlite config {source}` checks it")
        theirs = toml.flatten(tree)
        if not any(map(is_known, theirs)):
            raise ConfigError(f"{source} has no key of torchtitan")
        ours, todo = migrate_model(theirs, source)
        comments = []
    # The path of a data set replaces its name, so paths are converted last.
    for key, value in sorted(theirs.items(), key=lambda item: item[0].endswith("_path")):
        made, note, undecided = migrate_key(key, value)
        if "metrics.sinks" in made:  # several keys name one sink each
            made = {"metrics.sinks": [*ours.get("metrics.sinks", []), *made["metrics.sinks"]]}
        ours |= made
        comments.append(f"{key} {note}")
        todo += [comments[-1]] if undecided else []
    if weights := initial_weights(theirs):
        ours["checkpoint.initial_load_path"] = weights
    for key, value in tables.DEFAULTS.items():
        if key not in ours:
            ours[key] = value
            comments.append(f"{key}: torchtitan's default")
    todo += [*fill_inputs(ours), *refusals(nested(ours)), WEIGHT_DECAY]
    if ours.get("parallelism.pipeline_parallel_degree", 1) != 1:
        todo.append(PIPELINE)
    head = [f"From {source.name} of torchtitan, by titanlite migrate.", *(f"TO DO: {line}" for line in todo)]
    lines = [f"# {' '.join(line.split())}\n" for line in (*head, *comments)]
    return f"{''.join(lines)}\n{tomli_w.dumps(nested(ours))}", todo


def migrate_model(theirs: Values, source: Path) -> tuple[Values, list[str]]:
    """Return titanlite's keys for torchtitan's model, and TO DO lines. Raises ConfigError for a model
    that FLAVORS lacks."""
    name, flavor = theirs.get("model.name", "llama3"), str(theirs.get("model.flavor", "debugmodel"))
    if name not in tables.FLAVORS:
        known = " and ".join(tables.FLAVORS)
        raise ConfigError(f"{source}: model.name = {name!r}: only files of {known} can be migrated")
    flavors = tables.FLAVORS[name]
    ending = next((ending for ending in tables.MASKED if flavor.endswith(ending)), "")
    plain = flavor.removesuffix(ending)
    if plain not in flavors:
        raise ConfigError(f"{source}: model.flavor = {flavor!r} (known: {', '.join(flavors)})")
    size, overrides = flavors[plain]
    family = f"{name}_moe" if plain in tables.WITH_EXPERTS else name
    ours = {"model.name": family, "model.flavor": size, "model.overrides": overrides}
    if plain in tables.WITH_EXPERTS:
        ours["moe.load_balance"] = "none"
    if ending:
        ours["data.mask_documents"] = True
    todo = [ROPE] if name == "llama3" else [EXPERTS] if plain in tables.WITH_EXPERTS else []
    return ours, todo if "model.hf_assets_path" in theirs else [*todo, VOCABULARY]


def migrate_key(key: str, value: Any) -> tuple[Values, str, bool]:
    """Return titanlite's keys and values for a torchtitan key, a comment on the change, and whether the user
    has to decide something."""
    if value is None and is_known(key):
        return {}, "is unset", False
    if key in tables.RENAMED:
        return {tables.RENAMED[key]: value}, f"-> {tables.RENAMED[key]}", False
    if key in ("model.name", "model.flavor"):
        return {}, f"= {value!r}", False
    if key in tables.CONVERTED:
        try:
            made = tables.CONVERTED[key].convert(value)
            return made, f"-> {', '.join(made)}" if made else f"= {value!r}: needs no key", False
        except (ValueError, TypeError, AttributeError) as e:
            return {}, f"= {value!r}: {e}", True
    if reason := reason_without_counterpart(key):
        return {}, f"= {value!r}: {reason}", tables.HARMLESS.get(key, value) != value
    if key in own_keys():
        return {key: value}, "carried over", False
    near = suggest(key, {*own_keys(), *tables.RENAMED, *tables.CONVERTED}).partition(" (known")[0]
    return {}, f"= {value!r}: no key of torchtitan 0.1 to 0.3{near}", True


def is_known(key: str) -> bool:
    """Whether a release of torchtitan has the key."""
    named = key in {"model.name", "model.flavor", *tables.RENAMED, *tables.CONVERTED, *own_keys()}
    return named or reason_without_counterpart(key) is not None


def initial_weights(theirs: Values) -> str:
    """Return the folder of Hugging Face weights that torchtitan starts from if no path of weights is given;
    empty: there is none."""
    reads = theirs.get("checkpoint.enable") and theirs.get("checkpoint.initial_load_in_hf")
    if not reads or theirs.get("checkpoint.initial_load_path"):
        return ""
    return str(theirs.get("hf_assets_path") or theirs.get("model.hf_assets_path") or "")


def reason_without_counterpart(key: str) -> str | None:
    """Return why a torchtitan key has no counterpart; None for any other key."""
    for name, reason in tables.NO_COUNTERPART.items():
        if key == name or (name.endswith(".") and key.startswith(name)):
            return reason
    return None


def own_keys() -> set[str]:
    """Return titanlite's keys, including the keys of all choices."""
    sections = schema.table("job")["keys"].items()
    nodes = [
        (name, node) for name, section in sections for node in (section, *section.get("choices", {}).values())
    ]
    return {f"{name}.{key}" for name, node in nodes for key in node.get("keys", {})}


def fill_inputs(ours: Values) -> Iterator[str]:
    """Set tokenizer and sources if the file names none. Yields TO DO lines."""
    if "tokenizer" not in ours:
        ours |= tables.to_tokenizer("./tests/assets/tokenizer")
        yield "tokenizer: the file names no tokenizer; name one, or set name = 'bytes' and no path"
    if "data.sources" not in ours:
        ours |= tables.CONVERTED["training.dataset"].convert("c4_test")
    if ours.get("validation.enable") and "data.validation_sources" not in ours:
        ours |= tables.CONVERTED["validation.dataset"].convert("c4_validation")
    for key in ("data.sources", "data.validation_sources"):
        for source in ours.get(key, []):
            yield f"{key}: put the text into {source['path'][0]}, or name other files; nothing is downloaded"


def refusals(tree: dict[str, Any]) -> list[str]:
    """Return the errors of the migrated job, checked with the fewest ranks that its layout allows."""
    try:
        job = toml.build(Job, tree, Locator("", ""))
        job.check(job.parallelism.fewest_ranks)
        build_on_meta(job)
    except ConfigError as e:
        return [f"{error.key}: titanlite refuses this: {error}" for error in e.errors]
    return []


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as a tree, with the sections in titanlite's order."""
    tree: dict[str, Any] = {section.name: {} for section in dataclasses.fields(Job)}
    for key, value in values.items():
        put(tree, key, value)
    return {section: keys for section, keys in tree.items() if keys}
