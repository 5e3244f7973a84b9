"""What `titanlite migrate` decides by several of torchtitan's keys at once: the shape of the model, the
micro-batches of a pipeline, the warmup, the layers that float8 leaves alone, and what has no value yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config import toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.places import Locator
from titanlite.interop.torchtitan_meta import IN_BLOCK
from titanlite.job import Job
from titanlite.models.base import ModelFamily
from titanlite.tokenizers.tiktoken import Tiktoken
from titanlite.tools.config import build_on_meta
from titanlite.tools.torchtitan import (
    DEFAULT_TOKENIZER,
    DEFAULTS,
    FLAVORS,
    MASKING,
    SINCE_0_2_1,
    TEST_TIKTOKEN,
    TEST_TOKENIZER,
    Made,
    text_source,
    tokenizer,
)

AUTO_FILTER = "auto_filter_small_kn"


class Line(NamedTuple):
    """What became of one key. `ours`: the keys that it set."""

    key: str
    kind: str
    ours: Sequence[str] = ()
    note: str = ""


@dataclass
class Migration:
    """A migration under way. `theirs`: the file; `era`: its release; `made`: our keys; `lines`: the report;
    `todo`: what a person has to decide."""

    theirs: Made
    era: str
    made: Made = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)

    def value(self, key: str) -> Any:
        """The value of one of our keys as the migrated job will have it."""
        return self.made.get(key, DEFAULTS.get(key))

    def become(self, key: str, ours: Made, note: str) -> None:
        """Set keys of ours, and say so in the line of `key`, one of them: the line of the key of theirs that
        set it, or a new one for their default."""
        self.made |= ours
        at = next((i for i, line in enumerate(self.lines) if key in (line.key, *line.ours)), None)
        if at is None:
            self.lines.append(Line(key, "default", list(ours), note))
        else:
            line = self.lines[at]
            kind = "default" if line.kind == "default" else "replaced"
            self.lines[at] = Line(line.key, kind, list(ours), note)

    def job(self) -> Job:
        """The job so far. Raises ConfigError."""
        return toml.build(Job, nested(self.made), Locator("", ""))


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


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---- the model


def add_model(m: Migration, source: Path) -> None:
    """The family and its flavor, which every job needs. Raises ConfigError for one that titanlite lacks."""
    name, flavor = m.theirs.get("model.name", "llama3"), m.theirs.get("model.flavor", "debugmodel")
    if name not in FLAVORS:
        raise ConfigError(f"{source}: model.name = {name!r}: titanlite has {' and '.join(FLAVORS)}")
    ending = next((ending for ending in MASKING if str(flavor).endswith(ending)), "")
    plain = str(flavor).removesuffix(ending)
    if plain not in FLAVORS[name]:
        nearest = "" if "moe" in plain.lower() else suggest(str(flavor), FLAVORS[name]).partition(" (")[0]
        known = ", ".join(sorted(FLAVORS[name]))
        raise ConfigError(f"{source}: model.flavor = {flavor!r}{nearest} (known: {known})")
    ours, overrides = FLAVORS[name][plain]
    notes = ["its shape by overrides"] if overrides else []
    overrides = dict(overrides)
    if name == "llama3":
        notes += _rope(m, overrides)
    if ending:
        m.made["data.mask_documents"] = True
        notes.append("documents are masked from each other")
    family: Any = ModelFamily.choices[name]
    flavors = family.flavors
    if m.era == "0.1" and (size := _vocabulary(m)) != flavors[ours].vocab_size:
        overrides["vocab_size"] = size
        notes.append(f"its vocabulary is the tokenizer's, {size} ids")
    m.made |= {"model.name": name, "model.flavor": ours, "model.overrides": overrides}
    m.lines.append(Line("model.name", "carried over" if "model.name" in m.theirs else "default"))
    same = ours == flavor and not notes
    kind = "default" if "model.flavor" not in m.theirs else "carried over" if same else "replaced"
    set_here = [] if same else [key for key in m.made if key != "model.name"]
    m.lines.append(Line("model.flavor", kind, set_here, "; ".join(notes)))


def _rope(m: Migration, overrides: Made) -> list[str]:
    """torchtitan scales Llama's rotary embedding since 8 October 2025: 0.1.0 did not, 0.2.0 does."""
    early = m.era in ("0.1", "between 0.1 and 0.2")
    if early:
        overrides["rope_factor"] = 1.0
    if m.era != "0.1" and not SINCE_0_2_1 & m.theirs.keys():
        factor, other, side = (1.0, 8.0, "after") if early else (8.0, 1.0, "before")
        m.todo.append(
            f"model.overrides.rope_factor: {factor} is written, but the file does not say which is right: "
            f"torchtitan scales Llama's rotary embedding by 8 since 8 October 2025; {other} is right for a "
            f"checkout from {side} that day"
        )
    return ["its rotary embedding was not scaled"] if early else []


def _vocabulary(m: Migration) -> int:
    """torchtitan 0.1 takes the size of the vocabulary from the tokenizer."""
    path = str(m.theirs.get("model.tokenizer_path", DEFAULT_TOKENIZER["0.1"]))
    if Path(path).name == TEST_TIKTOKEN:
        return 2256
    try:
        return Tiktoken(path=path, num_special_tokens=256).build().vocab_size
    except ConfigError:
        m.todo.append(
            f"model.overrides.vocab_size: torchtitan 0.1 takes it from the tokenizer, but {path} cannot be "
            "read here; 128256, which is written, is that of Llama 3's"
        )
        return 128256


# ---- what the file leaves out


def add_required(m: Migration) -> None:
    """A tokenizer and a source of text, which a job needs, as torchtitan chooses them without being told."""
    era = m.era if m.era in DEFAULT_TOKENIZER else "0.2"
    if "tokenizer" not in m.made:
        m.made |= tokenizer(DEFAULT_TOKENIZER[era])
        m.lines.append(Line("tokenizer", "default", note="torchtitan's, which the file leaves out"))
    validates = m.made.get("validation.enable")
    for key, name in (("data.sources", "c4_test"), ("data.validation_sources", "c4_validation")):
        if key not in m.made and (validates or key == "data.sources"):
            m.made |= text_source(key)(name)
            m.lines.append(Line(key, "default", note="torchtitan's, which the file leaves out"))
        for found in m.made.get(key, []):
            m.todo.append(
                f"{key}: put the text in {found['path'][0]}, or name other files; nothing is downloaded"
            )


def add_defaults(m: Migration) -> None:
    """Write what the file leaves to torchtitan's defaults, where titanlite's differ."""
    ours = dict(flatten(toml.as_tree(m.job())))
    for key, value in DEFAULTS.items():
        section = key.split(".")[0]
        off = section in ("float8", "validation") and not m.made.get(f"{section}.enable")
        if key not in m.made and ours.get(key) != value and not off:
            m.made[key] = value
            m.lines.append(Line(key, "default", note="torchtitan's, which the file leaves out"))


# ---- values that depend on each other


def set_warmup(m: Migration) -> None:
    """torchtitan shortens a warmup that is longer than the schedule, and warms up to the last step;
    titanlite's schedule is made a step longer, so that the run is warmup alone."""
    warmup, steps = m.value("lr_scheduler.warmup_steps"), m.value("training.steps")
    total = m.value("lr_scheduler.total_steps") or steps
    if warmup >= total:
        m.become(
            "lr_scheduler.warmup_steps",
            {"lr_scheduler.warmup_steps": total, "lr_scheduler.total_steps": total + 1},
            f"torchtitan shortens a warmup of {warmup} steps to the {total} that there are; the schedule "
            "ends a step later, so that nothing is left to decay",
        )


def set_micro_batches(m: Migration) -> None:
    """torchtitan cuts local_batch_size into a pipeline's micro-batches; titanlite's local_batch_size is one
    micro-batch, and global_batch_size says how many there are."""
    stages = m.value("parallelism.pipeline_parallel_degree")
    local, whole = m.value("training.local_batch_size"), m.value("training.global_batch_size")
    if stages == 1:
        return
    size = m.theirs.get("parallelism.pipeline_parallel_microbatch_size", 1)
    if "experimental.pipeline_parallel_degree" in m.theirs:  # before 0.1.0 the file gave their number
        number = m.theirs.get("experimental.pipeline_parallel_microbatches", stages)
        size = local // number if isinstance(number, int) and number > 0 else 0
    if not isinstance(size, int) or size < 1 or local % size:
        m.todo.append(f"training.local_batch_size: {local} cannot be cut into micro-batches of {size}")
        return
    m.become(
        "training.local_batch_size",
        {"training.local_batch_size": size},
        f"the {local} of a rank go through the pipeline in micro-batches of {size}, which this is here",
    )
    if whole != -1:
        return
    shard, replicate = (m.value(f"parallelism.data_parallel_{k}_degree") for k in ("shard", "replicate"))
    whole = local * max(shard, 1) * replicate
    m.become(
        "training.global_batch_size", {"training.global_batch_size": whole}, f"{local} per data-parallel rank"
    )
    if shard == -1:
        m.todo.append(
            f"training.global_batch_size: {whole} is for data_parallel_shard_degree = 1; the file leaves the "
            f"degree to the number of ranks: for a degree of n it is n x {whole}"
        )


def set_float8_layers(m: Migration) -> None:
    """float8.filter_fqns by the names of titanlite's layers: it leaves out the same layers of the blocks."""
    key = "float8.filter_fqns"
    if not m.made.get(key):
        return
    words = m.made[key]
    job = m.job()
    found, left = _translated(words, job.model.config.n_layers)
    notes = ["the names of the same layers here; the head is left out anyway"]
    if AUTO_FILTER in words:
        notes.append(f"{AUTO_FILTER} has no counterpart, float8.min_elements is the nearest")
        if job.float8.enable:
            m.todo.append(
                f"float8.min_elements: torchtitan's {AUTO_FILTER} leaves layers with small matrices in "
                "bfloat16; titanlite does so by a number of elements, which has to be set"
            )
    ours: Made = {key: found}
    if left == 7 * job.model.config.n_layers and job.float8.enable:
        ours = {key: [], "float8.enable": False}
        notes = ["it leaves out every layer of the blocks: float8 is off"]
    m.become(key, ours, "; ".join(notes))


def _translated(words: Iterable[str], n_layers: int) -> tuple[list[str], int]:
    """Parts of names that match the same layers here as `words` do in torchtitan, and the number of those."""
    kinds = {theirs: ours for theirs, ours in IN_BLOCK.items() if "norm" not in theirs}
    layers = {
        f"layers.{i}.{theirs}": f"model.layers.{i}.{ours}"
        for i in range(n_layers)
        for theirs, ours in kinds.items()
    }
    parts = {"attention": "self_attn", "feed_forward": "mlp"}
    parts |= {theirs.split(".")[1]: ours.split(".")[1] for theirs, ours in kinds.items()}
    found: dict[str, None] = {}
    all_left: set[str] = set()
    for word in words:
        left = {ours for theirs, ours in layers.items() if word in theirs}
        all_left |= left
        ours = ".".join(parts.get(part, part) for part in word.split("."))
        if left and left == {name for name in layers.values() if ours in name}:
            found[ours] = None
        else:
            found |= dict.fromkeys(sorted(left))
    return list(found), len(all_left)


def set_max_position(m: Migration) -> None:
    """Let the model take the file's sequences where its flavor is made for shorter ones: torchtitan does."""
    job = m.job()
    limit, seq_len = job.model.max_position, job.training.seq_len
    if limit is not None and seq_len > limit:
        m.made["model.overrides"]["max_position"] = seq_len
        note = f"the flavor is made for {limit} tokens"
        m.lines.append(Line("model.overrides.max_position", "default", note=note))


def set_recomputed_blocks(m: Migration) -> None:
    """Activation checkpointing by operations does not work with tensor parallel and the compiler; that of
    whole blocks gives the same numbers in less memory."""
    option = m.value("activation_checkpoint.selective_ac_option")
    tensor_parallel = m.value("parallelism.tensor_parallel_degree") > 1
    by_operation = m.value("activation_checkpoint.mode") == "selective" and not option.isdecimal()
    if by_operation and tensor_parallel and m.value("compile.enable"):
        m.become(
            "activation_checkpoint.mode",
            {"activation_checkpoint.mode": "full"},
            f"{option!r} does not work with tensor parallel and compile.enable; full gives the same numbers "
            "with less memory and in more time, memory_budget is between them",
        )


# ---- what titanlite says to the whole


def check(m: Migration) -> None:
    """Add to `todo` what keeps the job from starting on as few ranks as it is for."""
    job = m.job()
    ranks = job.parallelism.fewest_ranks
    for rules in (lambda: job.check(ranks), lambda: build_on_meta(job)):
        try:
            rules()
        except ConfigError as e:
            m.todo.append(f"{e.key or ''}: on {ranks} ranks titanlite refuses this: {e}")
    check_tokenizer(m, job)


def check_tokenizer(m: Migration, job: Job) -> None:
    """Add to `todo` what is wrong with the tokenizer that the job names."""
    path = Path(getattr(job.tokenizer, "path", ""))
    named = {"model.tokenizer_path", "model.hf_assets_path"} & m.theirs.keys()
    if path.parts[-3:] == Path(TEST_TOKENIZER).parts:
        m.todo.append(
            f"tokenizer.path: {'' if named else 'the file names none, and '}{path} is torchtitan's test "
            "tokenizer, which titanlite refuses: BPE over characters loses text that it does not know; name "
            'another, or set tokenizer.name = "bytes" and no path'
        )
    elif path.exists():
        try:
            job.model.check_vocabulary(job.tokenizer.build().vocab_size)
        except ConfigError as e:
            m.todo.append(f"{e.key}: titanlite refuses this: {e}")
    elif not named:
        m.todo.append(f"tokenizer.path: the file names none; {path} is torchtitan's default, and not there")
