"""`titanlite config` refuses what a run would refuse: by all rules, and with --ranks also by the files.
What `titanlite train` says of the same job is the reference.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.datasets import write_dataset
from tests.support.jobs import make_job, write_toml
from titanlite import cli
from titanlite.tokenizers.bytes import Bytes
from titanlite.train import train

Said = tuple[int, str]


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`said("config", "debug")`: the exit code and the last line of an error."""

    def said(*argv: object) -> Said:
        capfd.readouterr()
        code = cli.run([str(word) for word in argv])
        lines = capfd.readouterr().err.splitlines()
        return code, next((line for line in reversed(lines) if line.startswith("titanlite: ")), "")

    return said


CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"
RULES = [
    ("mode: memory_budget needs the compiler", "--activation_checkpoint.mode=memory_budget"),
    ("without the compiler float8", "--float8.enable"),
    ("are not a multiple of local_batch_size 2", "--training.global_batch_size=7"),
    ("20 is below training.steps = 160", "--lr_scheduler.total_steps=20"),
    ("10 steps of warmup need", "--training.steps=5 --lr_scheduler.warmup_steps=10"),
    ("to validate on: set data.holdout_sequences", "--validation.enable --data.holdout_sequences=0"),
    ("share a weight, but are in different pipeline stages", "--parallelism.pipeline_parallel_degree=2"),
    ("n_heads = 4 is not divisible by 3", "--parallelism.tensor_parallel_degree=3"),
    ("n_kv_heads = 2 is not divisible by 4", "--parallelism.tensor_parallel_degree=4"),
    ("4096 tokens are more than max_position = 2048", "--training.seq_len=4096"),
    ("2000 steps of warmup need", "llama3_8b --training.steps=1000 --lr_scheduler.warmup_steps=2000"),
]


@pytest.mark.parametrize(("message", "words"), RULES)
def test_rules_without_a_number_of_ranks(message, words, said, monkeypatch) -> None:
    name, *overrides = words.split() if words.startswith("llama") else ["debug", *words.split()]
    job = [CONFIGS / f"{name}.toml", *overrides]
    code, line = said("config", *job)
    assert code == 2
    assert message in line
    degree = words.partition("degree=")[2] or "1"
    monkeypatch.setenv("WORLD_SIZE", degree)
    monkeypatch.setenv("RANK", "0")
    assert said("train", *job) == (2, line)


def test_files_are_not_looked_at_without_a_number_of_ranks(said) -> None:
    assert said("config", "llama3_8b", "--job.dump_folder=/proc/no") == (0, "")


def test_the_number_of_ranks_counts(said) -> None:
    code, line = said("config", "llama3_8b", "--ranks=3")
    assert code == 2
    assert (
        "training.global_batch_size: 512 sequences are not a multiple of local_batch_size 1 x 3 ranks" in line
    )
    assert said("config", "debug", "--ranks", "0") == (
        2,
        "titanlite: command line, --ranks: '0' is not an integer from 1",
    )
    assert said("config", "debug", "--ranks=two")[0] == 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A finished run, `run`, on a dataset of shards, `tokens`; a dataset of another tokenizer, `other`; the
    run's job, `job.toml`."""
    place = tmp_path_factory.mktemp("place")
    tokenizer = Bytes().build()
    write_dataset(place / "tokens", [[256, *range(97, 117), 257]] * 40, tokenizer)
    write_dataset(place / "other", [[1, 2, 3] * 40])
    assert train(make_job(place, corpus, *on_shards(place), "--training.steps=2")) == 0
    return place


def on_shards(place: Path) -> list[str]:
    tokens = f"[{{name = 'tokens', path = '{place / 'tokens'}'}}]"
    return [f"--data.sources={tokens}", f"--job.dump_folder={place / 'run'}"]


# Placeholders: PLACE is the fixture's folder.
NEW = "--job.dump_folder=PLACE/new"  # for what would make the run in the fixture's folder another one
FILES = {
    "tokenizer": ["--tokenizer={name = 'tiktoken', path = 'PLACE/none.model'}"],
    "vocabulary": ["--model.overrides.vocab_size=250"],
    "text": ["--data.sources=[{name = 'text', path = ['PLACE/none/*.jsonl']}]"],
    "no shards": ["--data.sources=[{name = 'tokens', path = 'PLACE/none'}]"],
    "other tokenizer": ["--data.sources=[{name = 'tokens', path = 'PLACE/other'}]"],
    "long sequences": ["--training.seq_len=1000", "--model.overrides.max_position=1000", NEW],
    "held out": ["--data.holdout_sequences=1000", NEW],
    "epochs": ["--data.sources.0.max_epochs=0.001", "--training.steps=9"],
    "validation": [
        NEW, "--data.holdout_sequences=0",
        "--data.validation_sources=[{name = 'tokens', path = 'PLACE/none'}]",
    ],
    "tasks": ["--validation.enable", "--validation.tasks=[{name = 't', path = 'PLACE/job.toml'}]"],
    "same validation": [
        NEW, "--data.holdout_sequences=0",
        "--data.validation_sources=[{name = 'tokens', path = 'PLACE/tokens'}]",
    ],
    "initial weights": [
        "--checkpoint.initial_load_path=PLACE/none", NEW,
    ],
    "other initial weights": [
        "--checkpoint.initial_load_path=PLACE/run", "--model.overrides.n_layers=3", NEW,
    ],
    "run of another seed": ["--training.seed=7"],
    "run of another model": ["--model.overrides.n_layers=3"],
    "another batch": ["--training.global_batch_size=-1"],
    "trained on": ["--data.skip_sequences=[[3, 4], [900, 999]]"],
    "no such step": ["--checkpoint.load_step=77"],
    "ranks to profile": ["--profiling.enable_profiling", "--profiling.ranks=[3]"],
    "float8 layers": ["--float8.enable", "--float8.emulate", "--float8.filter_fqns=['nothing']"],
    "blocks": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=9"],
    "folder": ["--job.dump_folder=PLACE/job.toml/run"],
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_and_the_run_folder_with_a_number_of_ranks(case, place, said) -> None:
    words = [word.replace("PLACE", str(place)) for word in FILES[case]]
    job = [place / "job.toml", *on_shards(place), f"--data.cache_dir={place / 'cache'}", *words]
    before = sorted(place.rglob("*"))
    code, line = said("config", *job, "--ranks=1")
    assert code in (2, 3)
    assert sorted(place.rglob("*")) == before, "nothing is written"
    if case == "held out":  # titanlite train says it in the words of the same function
        assert "which has" in line
    assert said("train", *job) == (code, line)
    shutil.rmtree(place / "new", ignore_errors=True)


def test_a_good_job_is_printed_with_what_was_checked(place, corpus, capsys) -> None:
    job = [str(place / "job.toml"), *on_shards(place)]
    assert cli.run(["config", *job, "--ranks=1", "--training.steps=3"]) == 0
    about = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert about[1].endswith("; the tokenizer has 258 ids")
    assert "# checked with --ranks=1: rules, files and layout" in about
    text = write_toml(place, corpus)
    before = sorted(place.rglob("*"))
    assert cli.run(["config", str(text), "--ranks=2", f"--job.dump_folder={place / 'new'}"]) == 0
    assert "\n# not checked: data that is tokenised" in capsys.readouterr().out
    assert sorted(place.rglob("*")) == before


SPREAD = ["llama3_8b", "--ranks=64", "--parallelism.tensor_parallel_degree=8", "--model.overrides.n_layers=1"]


def test_a_layout_is_simulated_without_files(capfd) -> None:
    job = ["config", *SPREAD, "--no-files", "--training.global_batch_size=64", "--job.dump_folder=/proc/no"]
    assert cli.run(job) == 0
    out, err = capfd.readouterr()
    assert "\n# checked with --ranks=64: rules and layout\n" in out
    assert "\n# layout of 64 rank(s): dp_shard 8 x tp 8\n# ranks 0 to 63: block 0, " in out
    assert "warning" not in out + err
    assert cli.run([*job, "--gpus-per-node", "4"]) == 0
    out, err = capfd.readouterr()
    warning = "warning: tensor parallel spans nodes: groups of 8 ranks do not fit into nodes of 4"
    assert f"\n# {warning}" in out
    assert f"titanlite: {warning}" in err


@pytest.mark.parametrize("option", ["--no-files", "--gpus-per-node=4"])
def test_options_of_a_number_of_ranks_need_it(option, said) -> None:
    code, line = said("config", "debug", option)
    assert code == 2
    assert line.startswith(f"titanlite: command line, {option.partition('=')[0]}: needs --ranks")


def test_files_are_looked_at_unless_told_otherwise(said) -> None:
    assert said("config", *SPREAD)[0] == 2
    assert said("config", *SPREAD, "--gpus-per-node=0") == (
        2, "titanlite: command line, --gpus-per-node: '0' is not an integer from 1",
    )  # fmt: skip
