"""Pins what users' files rest on: every file in train_configs/ loads, checks and reads back from its dump;
the table of keys in the package and the reference in docs/ are current; and the set of public keys is the
frozen one, so that adding or dropping a key is a deliberate act. After such a change, `python -m
tests.test_configs --update` writes tests/golden/public_keys.txt, the table and the references anew.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.tiers import sampled
from titanlite import cli, commands
from titanlite.config import reference, schema, toml
from titanlite.config.component import Component, ConfigError
from titanlite.config.imports import import_own_components
from titanlite.corpus.prepare import Prepare
from titanlite.job import Job, load_job
from titanlite.runtime import environment

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
PUBLIC_KEYS = ROOT / "tests" / "golden" / "public_keys.txt"
REFERENCES = {"config.md": "config", "prepare.md": "prepare"}
SCHEMAS = {"job": Job, "prepare": Prepare}
UPDATE = "python -m tests.test_configs --update"

# The smallest of these that a file's parallelism and global batch divide over is what it is checked on.
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@contextmanager
def shipped_choices() -> Iterator[None]:
    """Only titanlite's own choices, whatever other tests registered in this process."""
    import_own_components()
    kinds = [kind for kind in all_subclasses(Component) if kind.is_kind()]
    before = {kind: kind.choices for kind in kinds}
    for kind in kinds:
        kind.choices = {n: c for n, c in kind.choices.items() if c.__module__.startswith("titanlite.")}
    try:
        yield
    finally:
        for kind, choices in before.items():
            kind.choices = choices


def all_subclasses(cls: type[Component]) -> list[type[Component]]:
    return [cls_ for child in cls.__subclasses__() for cls_ in (child, *all_subclasses(child))]


def public_keys() -> list[str]:
    """`section.key`, or `section[choice].key`, of every key that a TOML file may have, sorted."""
    with shipped_choices():
        actual = [
            f"{section.path.strip('[]') or 'prepare'}{f'[{section.choice}]' if section.choice else ''}.{key}"
            for classes in SCHEMAS.values()
            for section in reference.sections(schema.describe(classes, docs=True))
            for key in [*([section.picked_by] if section.choice else []), *(key.name for key in section.keys)]
        ]
    return sorted(set(actual))


def described() -> str:
    """The content of the table of keys, from the classes."""
    with shipped_choices():
        tables = {name: schema.describe(classes, docs=True) for name, classes in SCHEMAS.items()}
    return json.dumps(tables, indent=1) + "\n"


def load(path: Path) -> tuple[Job, int]:
    """The checked job of a file, and the smallest number of ranks on which it is one."""
    complaints = []
    for world_size in WORLD_SIZES:
        try:
            return load_job(path, world_size=world_size), world_size
        except ConfigError as e:
            complaints.append(str(e))
    raise AssertionError(f"{path.name} loads on no number of ranks: {complaints[0]}")


def opening(path: Path) -> str:
    """The comment that a file opens with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))


def stated_ranks(path: Path) -> int:
    """The number of GPUs that a file states in its opening comment; 1 for one or more GPUs, or a CPU."""
    stated = re.search(r"Hardware: (\d+) GPUs", opening(path))
    return int(stated[1]) if stated else 1


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_are_configurations():
    assert "debug" in {path.stem for path in CONFIGS}


def test_a_shipped_configuration_loads_and_checks(config):
    job, _ = load(config)
    assert job.training.steps > 0


@pytest.mark.parametrize("steps", [1, 5, 1000])
def test_a_shipped_configuration_takes_any_number_of_steps_after_its_warmup(config, steps):
    job, world_size = load(config)
    steps += max(job.lr_scheduler.warmup_steps, 0)
    assert load_job(config, [f"--training.steps={steps}"], world_size).training.steps == steps


def test_the_dump_of_a_shipped_configuration_reads_back_equal(config, tmp_path):
    job, world_size = load(config)
    dumped = tmp_path / "job.toml"
    dumped.write_text(toml.dump(job), encoding="utf-8")
    assert load_job(dumped, world_size=world_size) == job


@pytest.mark.parametrize("path", sampled(CONFIGS, CONFIGS[:2]), ids=lambda path: path.stem)
def test_a_shipped_configuration_passes_a_dry_run_at_its_stated_size(path, capsys):
    ranks = stated_ranks(path)
    assert cli.run(["config", str(path), f"--ranks={ranks}", "--no-files"]) == 0
    out, err = capsys.readouterr()
    assert "warning" not in out + err
    whole, per_rank = re.findall(r" ([\d,]+) parameters(?: per rank)?\n", out)
    shards = load_job(path, world_size=ranks).parallelism.degrees(ranks).dp_shard
    numbers = [int(number.replace(",", "")) for number in (whole, per_rank)]
    assert numbers[0] <= numbers[1] * shards <= 1.01 * numbers[0]


def test_the_stated_sizes() -> None:
    sizes = {path.stem: stated_ranks(path) for path in CONFIGS}
    assert sizes["debug"] == sizes["llama3_1b"] == 1
    assert (sizes["llama3_8b"], sizes["qwen3_14b"], sizes["llama3_405b"]) == (8, 16, 512)


def test_a_shipped_configuration_opens_with_its_hardware(config):
    assert re.search(r"\b(GPUs?|CPU)\b", opening(config))


def test_a_shipped_configuration_loads_on_the_gpus_that_it_names(config):
    named = re.search(r"\b(\d+) (?:\w+ )?GPUs?\b", opening(config))
    assert load_job(config, world_size=int(named[1]) if named else 1)


def test_shipped_configurations_have_run_folders_of_their_own():
    folders = [load(path)[0].job.dump_folder for path in CONFIGS]
    assert len(set(folders)) == len(folders)


def test_the_debug_configuration_runs_on_one_rank_from_what_is_in_the_tree():
    job, world_size = load(ROOT / "train_configs" / "debug.toml")
    assert world_size == 1
    assert (ROOT / job.tokenizer.path).is_file()
    assert [source.name for source in job.data.sources] == ["python_stdlib"]


def test_a_key_that_is_wrong_does_not_load(tmp_path):
    # The negative control of the tests above.
    path = tmp_path / "wrong.toml"
    path.write_text((ROOT / "train_configs" / "debug.toml").read_text().replace("seq_len", "sequence_len"))
    with pytest.raises(AssertionError, match="unknown key 'sequence_len'"):
        load(path)


@pytest.mark.parametrize(
    "switch",
    [
        ["--tokenizer.name=bytes"],
        ["--tokenizer={name='bytes'}"],
        ["--tokenizer.name=huggingface", "--tokenizer.path=DIR"],
        ["--tokenizer.name=sentencepiece", "--tokenizer.path=FILE"],
        ["--model.name=huggingface", "--model.path=DIR"],
        ["--lr_scheduler.name=piecewise", "--lr_scheduler.points=[[0, 1.0], [9, 0.5]]"],
        ["--data.sources.0.name=python_stdlib"],
        ["--optimizer.name=muon"],
    ],
)
def test_the_command_line_may_choose_another_component_than_a_shipped_configuration(switch):
    for path in CONFIGS:
        tree, locator = toml.read(path, switch)
        toml.check(schema.table("job"), tree, locator)


def test_the_record_of_a_job_with_another_component_reads_back_equal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(environment, "launcher_pid", lambda: None)  # the launcher of another test
    job = load_job("debug", ["--tokenizer.name=bytes"])
    left_out = "tokenizer.path: left out: tokenizer 'bytes', chosen on the command line, has no such key"
    assert re.fullmatch(rf"titanlite: \S+debug\.toml:16: {left_out}\n", capsys.readouterr().err)
    recorded = tmp_path / "job.toml"
    recorded.write_text(toml.dump(job), encoding="utf-8")
    assert job.tokenizer.name == "bytes"
    assert load_job(recorded) == job
    assert load_job("debug", ["--tokenizer.name=bytes"]) == job
    assert not capsys.readouterr().err  # a line is told once


def test_a_leading_tilde_of_every_key_that_names_a_path_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    overrides = [
        "--job.dump_folder=~/runs/x", "--data.cache_dir=~", "--checkpoint.initial_load_path=~/model",
        "--tokenizer.path=~/my.tiktoken", "--data.sources=[{name='text', path=['~/a', 'b/~']}]",
        "--compile.cache_dir=./~",
    ]  # fmt: skip
    job = load_job("debug", overrides, world_size=None)
    assert (job.job.dump_folder, job.data.cache_dir) == ("/home/ada/runs/x", "/home/ada")
    assert (job.checkpoint.initial_load_path, job.compile.cache_dir) == ("/home/ada/model", "./~")
    assert job.tokenizer.path == "/home/ada/my.tiktoken"
    assert job.data.sources[0].path == ["/home/ada/a", "b/~"]
    with pytest.raises(ConfigError, match=r"^command line, --job.dump_folder: '~nobody-here/x': the home"):
        load_job("debug", ["--job.dump_folder=~nobody-here/x"])


def test_every_key_that_names_a_path_has_the_type_path():
    with shipped_choices():
        keys = {
            (f"{section.path}.{key.name}", key.type)
            for classes in SCHEMAS.values()
            for section in reference.sections(schema.describe(classes, docs=True))
            for key in section.keys
        }
    named = re.compile(r"(path|folder|dir|file|template|input|output)$")
    paths = {(name, kind) for name, kind in keys if named.search(name)}
    assert len(paths) > 10
    assert {kind for _, kind in paths} == {"path", "list[path]"}


def test_the_table_of_keys_is_that_of_the_classes():
    assert schema.FILE.read_text(encoding="utf-8") == described(), f"{schema.FILE} is old; run: {UPDATE}"


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_is_current(name):
    file = ROOT / "docs" / name
    printed = commands.text(REFERENCES[name], ["--reference"])
    assert file.read_text(encoding="utf-8") == printed, f"{file} is old; run: {UPDATE}"


def test_the_public_keys_are_the_frozen_ones():
    frozen, actual = PUBLIC_KEYS.read_text().splitlines(), public_keys()
    added, gone = sorted(set(actual) - set(frozen)), sorted(set(frozen) - set(actual))
    assert actual == frozen, (
        f"the public keys have changed: added {added}, gone {gone}. A key that is gone breaks users' files "
        f"and the resumption of their runs; if this is meant, say so in CHANGELOG.md and run: {UPDATE}"
    )


def test_the_public_keys_are_the_keys_of_a_resolved_job():
    def keys_of(path: str, table: dict) -> Iterator[str]:
        picked_by = "backend" if path == "attention" else "name"
        choice = f"[{table[picked_by]}]" if picked_by in table else ""
        for key, value in table.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                for inner in value:
                    yield from keys_of(f"{path}.{key}", inner)
            else:
                yield f"{path}{choice}.{key}"

    job, _ = load(ROOT / "train_configs" / "debug.toml")
    tree = toml.as_tree(job)
    assert tree.pop("stages") == []
    used = {key for section, table in tree.items() for key in keys_of(section, table)}
    assert len(used) > 40
    # Lists of tables of which there are none.
    used -= {
        "data.validation_sources", "training.batch_ramp", "optimizer[adamw].param_groups",
        "optimizer[adamw].schedules", "metrics.sinks", "metrics.extra", "validation.tasks",
    }  # fmt: skip
    assert used <= set(public_keys())


def update() -> None:
    """Write what the tests above compare with."""
    PUBLIC_KEYS.write_text("".join(f"{key}\n" for key in public_keys()))
    schema.FILE.write_text(described(), encoding="utf-8")
    for name, verb in REFERENCES.items():
        (ROOT / "docs" / name).write_text(commands.text(verb, ["--reference"]), encoding="utf-8")
    files = [PUBLIC_KEYS, schema.FILE, *(ROOT / "docs" / name for name in REFERENCES)]
    print(f"wrote {', '.join(str(file.relative_to(ROOT)) for file in files)}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {UPDATE}")
    update()
