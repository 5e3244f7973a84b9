"""`titanlite migrate`: every key of a torchtitan TOML file is accounted for, and the result is a job that
trains the same, or says in a TO DO line what is left to decide. test_migrate_json.py has the files of 0.3."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchtitan_table import KEYS, PAGE, page
from titanlite import cli
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.contrib.migrate import migrate, migrate_key, own_keys, reason_without_counterpart
from titanlite.contrib.torchtitan_keys import (
    CONVERTED,
    DEFAULTS,
    FLAVORS,
    HARMLESS,
    NO_COUNTERPART,
    RENAMED,
    WITH_EXPERTS,
)
from titanlite.job import Job, load_job

# Keys and values as torchtitan's Llama 3 files have them, in 0.1 and in 0.2; then what differs by size.
BOTH: dict[str, Any] = {
    "job.dump_folder": "./outputs", "job.description": "Llama 3", "profiling.enable_profiling": True,
    "profiling.save_traces_folder": "profile_trace", "profiling.profile_freq": 100, "metrics.log_freq": 10,
    "metrics.enable_tensorboard": True, "metrics.save_tb_folder": "tb", "model.name": "llama3",
    "optimizer.name": "AdamW", "optimizer.eps": 1e-8, "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.decay_ratio": 0.8, "training.seq_len": 8192, "training.max_norm": 1.0,
    "training.steps": 1000, "training.dataset": "c4", "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1, "parallelism.pipeline_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1, "checkpoint.folder": "checkpoint", "checkpoint.interval": 500,
    "checkpoint.export_dtype": "float32", "checkpoint.async_mode": "disabled",
}  # fmt: skip
OLD = BOTH | {
    "training.compile": False, "checkpoint.enable_checkpoint": False, "job.print_args": False,
    "model.tokenizer_path": "./assets/tokenizer/tokenizer.model",
    "checkpoint.last_save_model_weights_only": False, "float8.enable_fsdp_float8_all_gather": False,
    "float8.precompute_float8_dynamic_scale_for_fsdp": False, "float8.filter_fqns": ["output"],
}  # fmt: skip
NEW = BOTH | {
    "model.hf_assets_path": "./assets/hf/Llama-3.1-8B", "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.1, "checkpoint.enable": True, "checkpoint.last_save_model_only": True,
    "compile.enable": True, "compile.components": ["model", "loss"], "validation.enable": True,
    "validation.dataset": "c4_validation", "validation.freq": 500, "validation.steps": 1200,
    "debug.seed": 42, "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
    "quantize.linear.float8.filter_fqns": ["output"],
}  # fmt: skip
FULL = {"activation_checkpoint.mode": "full"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
TP, ASYNC = {"parallelism.tensor_parallel_degree": 8}, "parallelism.enable_async_tensor_parallel"
SIZES: dict[str, dict[str, Any]] = {
    "debugmodel": {
        **SELECTIVE, "optimizer.lr": 8e-4, "training.local_batch_size": 8, "training.seq_len": 2048,
        "training.steps": 10, "lr_scheduler.warmup_steps": 2, "training.dataset": "c4_test",
    },
    "8B": {**SELECTIVE, "optimizer.lr": 3e-4, "training.local_batch_size": 1},
    "8B_flex": {**FULL, "optimizer.lr": 3e-4, "training.local_batch_size": 1},
    "70B": {**FULL, **TP, ASYNC: False, "optimizer.lr": 1.5e-4, "training.local_batch_size": 8},
    "405B": {**FULL, **TP, ASYNC: True, "optimizer.lr": 8e-5, "training.local_batch_size": 2},
}  # fmt: skip
CONVERTERS = {"0.1": {"model.converters": "float8"}, "0.2": {"model.converters": ["quantize.linear.float8"]}}
FILES = {
    f"{release} {size}": {
        **keys, "model.flavor": size, **SIZES[size], **(CONVERTERS[release] if size == "405B" else {}),
        **({"training.compile": True} if (release, size) == ("0.1", "405B") else {}),
    }
    for release, keys in (("0.1", OLD), ("0.2", NEW))
    for size in SIZES
    if (release, size) != ("0.1", "8B_flex")
}  # fmt: skip
SHAPES = {"debugmodel": (256, 6), "8B": (4096, 32), "70B": (8192, 80), "405B": (16384, 126)}


def write(folder: Path, keys: dict[str, Any]) -> Path:
    """A TOML file of dotted keys."""
    path = folder / "torchtitan.toml"
    words = {True: "true", False: "false"}
    lines = [f"{k} = {words[v] if isinstance(v, bool) else repr(v)}" for k, v in keys.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def result(folder: Path, keys: dict[str, Any]) -> tuple[Job, str, list[str]]:
    """The job, its text, and the keys that have a TO DO line."""
    text, todo = migrate(write(folder, keys))
    (folder / "titanlite.toml").write_text(text)
    assert [line for line in text.splitlines() if line.startswith("# TO DO: ")] == [
        f"# TO DO: {line}" for line in todo
    ]
    job = load_job(folder / "titanlite.toml", world_size=None)
    return job, text, [line.replace(":", "").split()[0] for line in todo]


@pytest.mark.parametrize("file", FILES)
def test_torchtitans_files(file: str, tmp_path: Path) -> None:
    keys = FILES[file]
    job, text, todo = result(tmp_path, keys)
    assert "titanlite refuses this" not in text, "`titanlite config` would fail"
    validates = ["data.validation_sources"] if "validation.enable" in keys else []
    unsaid = ["model.overrides.vocab_size"] if file.startswith("0.1") else []
    assert todo == [
        "model.overrides.rope_factor", *unsaid, "data.sources", *validates, "optimizer.weight_decay"
    ]  # fmt: skip
    lines = text.partition("\n\n")[0].splitlines()
    for key in keys:
        assert sum(line.startswith(f"# {key} ") for line in lines) == 1, key
    config = job.model.config
    assert (config.dim, config.n_layers) == SHAPES[file.split()[1].removesuffix("_flex")]
    assert config.rope_factor == 8.0
    training = job.training
    assert (job.optimizer.lr, training.steps) == (keys["optimizer.lr"], keys["training.steps"])
    assert (training.seq_len, training.local_batch_size, training.global_batch_size) == (
        keys["training.seq_len"], keys["training.local_batch_size"], -1
    )  # fmt: skip
    assert (job.lr_scheduler.warmup_steps, job.lr_scheduler.decay_ratio) == (
        keys["lr_scheduler.warmup_steps"], 0.8
    )  # fmt: skip
    assert job.activation_checkpoint.mode == keys["activation_checkpoint.mode"]
    assert job.parallelism.tensor_parallel_degree == keys.get("parallelism.tensor_parallel_degree", 1)
    assert job.parallelism.enable_async_tensor_parallel == keys.get(ASYNC, False)
    old = file.startswith("0.1")
    assert job.checkpoint.enable == (not old)
    assert job.compile.enable == (keys["training.compile"] if old else True)
    assert job.float8.enable == ("405B" in file)
    assert job.data.mask_documents == ("flex" in file)
    assert job.data.sources[0].path == [keys["training.dataset"]]
    if old:
        assert job.tokenizer.path == keys["model.tokenizer_path"]
        assert (job.tokenizer.name, job.tokenizer.num_special_tokens) == ("tiktoken", 256)
    else:
        assert (job.tokenizer.name, job.tokenizer.path) == ("huggingface", keys["model.hf_assets_path"])
        assert (training.seed, job.validation.freq, job.lr_scheduler.min_lr_factor) == (42, 500, 0.1)


@pytest.mark.parametrize("release", KEYS)
def test_every_key_of_a_release_is_known_and_its_default_needs_no_decision(release: str) -> None:
    for key, value in KEYS[release].items():
        if value is not None:
            _, note, undecided = migrate_key(key, value)
            assert not undecided, (key, note)
        assert "no key of torchtitan" not in migrate_key(key, value)[1]


def test_no_key_is_in_two_tables_and_each_one_is_torchtitans() -> None:
    tables = [*RENAMED, *CONVERTED, *NO_COUNTERPART]
    known = set().union(*KEYS.values())
    assert len(tables) == len(set(tables))
    assert [key for key in tables if not any(k == key or k.startswith(key) for k in known)] == []
    assert own_keys() & {*RENAMED, *NO_COUNTERPART} == set(), "titanlite has a key of that name"
    assert {*RENAMED.values(), *DEFAULTS} <= own_keys()
    assert all(reason_without_counterpart(key) for key in HARMLESS)


@pytest.mark.parametrize("release", [release for release in KEYS if release < "0.3"])
def test_a_default_that_is_left_out_is_as_if_it_were_written(release: str, tmp_path: Path) -> None:
    """For every key of the release at once, with float8 and validation on, where it has them."""
    written = {key: value for key, value in KEYS[release].items() if value is not None}
    switches: dict[str, Any] = CONVERTERS[release[:3]] | (
        {"training.compile": True}
        if release == "0.1.0"
        else {"compile.enable": True, "validation.enable": True}
    )
    jobs = [result(tmp_path, keys)[0] for keys in (written | switches, switches)]
    assert jobs[0].float8.enable
    trees = [toml.flatten(toml.as_tree(job)) for job in jobs]
    names = {"job", "tokenizer", "data"}  # paths of folders
    trees = [{k: v for k, v in tree.items() if k.split(".")[0] not in names} for tree in trees]
    assert trees[0] == trees[1]
    assert {key: trees[1][key] for key in DEFAULTS if key in trees[1]} == {
        key: value for key, value in DEFAULTS.items() if key in trees[1]
    }


@pytest.mark.full
def test_every_flavor_loads(tmp_path: Path) -> None:
    for name, flavors in FLAVORS.items():
        for flavor in flavors:
            job, _, _ = result(tmp_path, {"model.name": name, "model.flavor": flavor})
            assert job.model.name == (f"{name}_moe" if flavor in WITH_EXPERTS else name)
    job, text, _ = result(tmp_path, {"model.name": "qwen3", "model.flavor": "debugmodel_moe"})
    assert job.model.name == "qwen3_moe"
    assert (job.model.config.n_experts, job.model.config.n_experts_per_token) == (64, 8)
    assert job.moe.load_balance == "none"
    assert "# TO DO: moe.load_balance: torchtitan 0.2.2 never balances the experts" in text
    job, _, todo = result(tmp_path, {"model.name": "qwen3", "model.flavor": "1.7B"})
    assert (job.model.flavor, job.model.overrides) == ("1.7B", {})
    assert "model.overrides.rope_factor" not in todo


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"training.step": 5}, "no key of torchtitan 0.1 to 0.3; did you mean 'training.steps'?"),
        ({"my_section.thing": 5}, "= 5: no key of torchtitan 0.1 to 0.3"),
        ({"training.batch_size": 4}, "= 4: no key of torchtitan"),  # of the months before 0.1
        ({"training.dtype": "bfloat16"}, "= 'bfloat16': not supported"),
        ({"optimizer.early_step_in_backward": True}, "= True: not supported"),
        ({"fault_tolerance.enable": True}, "= True: not supported"),
        ({"checkpoint.initial_load_model_only": False}, "= False: initial_load_path reads weights alone"),
        ({"model.converters": ["quantize.linear.mx"]}, "float8 is titanlite's only converter"),
        ({"model.converters": 3}, "= 3: "),
        ({"quantize.linear.float8.filter_fqns": ["auto_filter_small_kn"]}, "these are torchtitan's layers"),
        ({"float8.filter_fqns": ["attention.wk", "output"]}, "these are torchtitan's layers"),
    ],
    ids=str,
)
def test_what_would_change_training_silently_is_to_do(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    _, text, todo = result(tmp_path, {"training.gc_freq": 50, **keys})
    (key,) = keys
    assert key in todo
    assert message in next(line for line in text.splitlines() if line.startswith(f"# TO DO: {key} "))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"checkpoint.keep_latest_k": 1}, "checkpoint.keep_latest_k: titanlite refuses this: "),
        ({"checkpoint.load_step": 0}, "checkpoint.load_step: titanlite refuses this: 0 is neither -1"),
        ({"training.steps": "many"}, "training.steps: titanlite refuses this: "),
        ({"optimizer.name": "Adam"}, "optimizer.name: titanlite refuses this: unknown optimizer 'adam'"),
        ({"training.steps": 10}, "lr_scheduler.warmup_steps: titanlite refuses this: 200 steps of warmup"),
        (FILES["0.2 405B"] | SELECTIVE, "activation_checkpoint.selective_ac_option: titanlite refuses"),
        (FILES["0.2 debugmodel"] | {"training.seq_len": 4096}, "training.seq_len: titanlite refuses this: "),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_titanlite_refuses_is_to_do(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    assert f"# TO DO: {message}" in migrate(write(tmp_path, keys))[0]


def test_a_pipelines_batch_is_to_do(tmp_path: Path) -> None:
    job, _, todo = result(tmp_path, FILES["0.2 8B"] | {"parallelism.pipeline_parallel_degree": 4})
    assert job.training.local_batch_size == 1, "as torchtitan's"
    assert todo[-1] == "training.local_batch_size"


def test_values_that_are_converted(tmp_path: Path) -> None:
    keys = {
        "training.dataset_path": "/data/mine", "training.dataset": "c4", "training.dataloader.num_workers": 3,
        "model.converters": ["quantize.linear.float8"], "compile.enable": True,
        "quantize.linear.float8.recipe_name": "rowwise", "checkpoint.async_mode": "async_with_pinned_mem",
    }  # fmt: skip
    job, _, _ = result(tmp_path, keys)
    assert job.data.sources[0].path == ["/data/mine"]
    assert (job.data.num_workers, job.checkpoint.async_mode) == (3, "async")
    assert (job.float8.enable, job.float8.recipe, job.float8.filter_fqns) == (True, "rowwise", [])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.name": "llama4"}, "model.name = 'llama4': only files of llama3 and qwen3 can be migrated"),
        ({"model.flavor": "9B"}, "model.flavor = '9B' (known: debugmodel, 8B, 70B, 405B)"),
        ({"model.name": "qwen3", "model.flavor": "30B"}, "model.flavor = '30B'"),
    ],
)
def test_a_model_that_cannot_be_migrated_is_refused(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as e:
        migrate(write(tmp_path, keys))
    assert message in str(e.value)


def test_the_page_has_the_current_table() -> None:
    text = PAGE.read_text()
    assert text == page(text), "python -m tests.support.torchtitan_table"


@pytest.mark.full
def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path, FILES["0.2 8B"]), tmp_path / "out.toml"
    assert cli.run(["migrate", str(source), "-o", str(output)]) == 0
    out, err = capsys.readouterr()
    assert out == (
        f"{source}: migrated; its TO DO lines ask for decisions on model.overrides.rope_factor, "
        "data.sources, data.validation_sources, optimizer.weight_decay\n"
    )
    assert err == ""
    written = output.read_text()
    assert load_job(output, world_size=8).training.steps == 1000
    assert cli.run(["migrate", str(source)]) == 0
    assert capsys.readouterr() == (written, out)
    assert cli.run(["migrate", str(source), "-o", str(output)]) == 2
    assert "out.toml exists; choose another" in capsys.readouterr().err
    assert cli.run(["migrate", str(tmp_path / "none.toml"), "-o", str(tmp_path / "x.toml")]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.toml", "torchtitan.toml"]
    assert cli.run(["migrate", str(source), "-o", str(tmp_path / "new" / "x.toml")]) == 0
    assert (tmp_path / "new" / "x.toml").read_text() == written


@pytest.mark.parametrize("name", ["debug", "recorded"])
def test_a_file_of_titanlites_is_not_migrated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "recorded":
        Path(name).write_text(toml.dump(load_job("debug")) + "\n[mine]\n")  # a mistake in it changes nothing
    assert cli.run(["migrate", name, "-o", "new.toml"]) == 2
    said = f"titanlite: {name} is already a titanlite file: `titanlite config {name}` checks it\n"
    assert capsys.readouterr() == ("", said)
    assert not Path("new.toml").exists()


@pytest.mark.parametrize("text", ["", "[project]\nversion = 1\n"])
def test_a_toml_file_of_another_program_is_refused(text: str, tmp_path: Path) -> None:
    source = tmp_path / "other.toml"
    source.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.toml has no key of torchtitan$"):
        migrate(source)
    source.write_text(text + "[training]\nsteps = 301\n")
    assert "\nsteps = 301\n" in migrate(source)[0]


def test_hugging_face_weights_that_torchtitan_starts_from_are_the_start(tmp_path: Path) -> None:
    def start(**more: Any) -> str:
        keys = FILES["0.2 8B"] | {f"checkpoint.{key}": value for key, value in more.items()}
        return result(tmp_path, keys)[0].checkpoint.initial_load_path

    assert start() == start(initial_load_in_hf=True, enable=False) == ""
    assert start(initial_load_in_hf=True) == FILES["0.2 8B"]["model.hf_assets_path"]
    assert start(initial_load_in_hf=True, initial_load_path="/weights") == "/weights"


def test_nothing_is_left_of_a_file_that_a_full_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path, FILES["0.2 8B"]), tmp_path / "new" / "out.toml"

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert cli.run(["migrate", str(source), "-o", str(output)]) == 2
    assert capsys.readouterr().err == (
        f"titanlite: {output}: No space left on device; make room there (df -h, df -i), or name a folder on "
        "another disk\n"
    )
    assert list(output.parent.iterdir()) == []
