"""`titanlite migrate`: every key of a torchtitan file is in the report, under what became of it, and the
result is a job with its values."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from titanlite import cli
from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.job import Job, load_job
from titanlite.runtime.training import BatchLayout
from titanlite.tokenizers.tiktoken import Tiktoken
from titanlite.tools.migrate import KINDS, became, era, migrate
from titanlite.tools.migrate_rules import flatten
from titanlite.tools.torchtitan import ERAS, FLAVORS, SINCE_0_2_1

# Keys and values as torchtitan's Llama 3 files had them, in 0.1 and in 0.2; then those in which sizes differ.
OLD: dict[str, Any] = {
    "job.dump_folder": "./outputs", "job.description": "Llama 3", "profiling.enable_profiling": True,
    "profiling.save_traces_folder": "profile_trace", "profiling.profile_freq": 100, "metrics.log_freq": 10,
    "metrics.enable_tensorboard": True, "metrics.save_tb_folder": "tb", "model.name": "llama3",
    "model.norm_type": "rmsnorm", "model.tokenizer_path": "./assets/tokenizer/original/tokenizer.model",
    "optimizer.name": "AdamW", "optimizer.eps": 1e-8, "lr_scheduler.warmup_steps": 200,
    "training.seq_len": 8192, "training.max_norm": 1.0, "training.steps": 1000, "training.compile": False,
    "training.dataset": "c4", "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1, "parallelism.pipeline_parallel_degree": 1,
    "checkpoint.enable_checkpoint": False, "checkpoint.folder": "checkpoint", "checkpoint.interval": 500,
    "checkpoint.model_weights_only": False, "checkpoint.export_dtype": "float32",
    "checkpoint.async_mode": "disabled", "float8.enable_fsdp_float8_all_gather": False,
    "float8.precompute_float8_dynamic_scale_for_fsdp": False, "float8.filter_fqns": ["output"],
}  # fmt: skip
NEW: dict[str, Any] = {
    **{k: v for k, v in OLD.items() if not k.startswith("float8") and k not in (
        "model.norm_type", "model.tokenizer_path", "training.compile", "checkpoint.enable_checkpoint",
        "checkpoint.model_weights_only",
    )},
    "model.hf_assets_path": "./assets/hf/Llama-3.1-8B", "lr_scheduler.decay_ratio": 0.8,
    "lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.1, "checkpoint.enable": True,
    "checkpoint.last_save_model_only": True, "compile.enable": True,
    "compile.components": ["model", "loss"], "validation.enable": True, "validation.dataset": "c4_validation",
    "validation.freq": 500, "validation.steps": 1200, "debug.seed": 42,
    "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
    "quantize.linear.float8.filter_fqns": ["output"],
}  # fmt: skip
RELEASE = {  # as in the files of the release 0.1.0: names of 0.2 are among its keys
    **{k: v for k, v in OLD.items() if k not in ("model.norm_type", "checkpoint.model_weights_only")},
    "job.print_args": False, "checkpoint.last_save_model_weights_only": False,
    "model.tokenizer_path": "./assets/tokenizer/tokenizer.model", "parallelism.context_parallel_degree": 1,
    "parallelism.fsdp_reshard_after_forward": "default", "lr_scheduler.decay_ratio": 0.8,
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]
FULL = {"activation_checkpoint.mode": "full"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
TP = {"parallelism.tensor_parallel_degree": 8, "parallelism.enable_async_tensor_parallel": True}
FILES = {
    "0.1 debug": {
        **OLD, **SELECTIVE, "model.flavor": "debugmodel", "optimizer.lr": 8e-4, "training.batch_size": 8,
        "training.seq_len": 2048, "training.steps": 10, "lr_scheduler.warmup_steps": 2,
        "training.dataset": "c4_test",
        "job.use_for_integration_test": True, "experimental.context_parallel_degree": 1,
    },
    "0.1 8B": {**OLD, **SELECTIVE, "model.flavor": "8B", "optimizer.lr": 3e-4, "training.batch_size": 1},
    "0.1 70B": {
        **OLD, **FULL, **TP, "model.flavor": "70B", "optimizer.lr": 1.5e-4, "training.batch_size": 8,
    },
    "0.1 405B": {
        **OLD, **FULL, **TP, "model.flavor": "405B", "optimizer.lr": 8e-5, "training.batch_size": 2,
        "model.converters": "float8", "training.compile": True,
    },
    "0.1 debug, release": {
        **RELEASE, **SELECTIVE, "model.flavor": "debugmodel", "optimizer.lr": 8e-4,
        "training.local_batch_size": 8, "training.seq_len": 2048, "training.steps": 10,
        "lr_scheduler.warmup_steps": 2, "training.dataset": "c4_test",
        "model.tokenizer_path": "./tests/assets/test_tiktoken.model",
    },
    "0.1 8B, release": {
        **RELEASE, **SELECTIVE, "model.flavor": "8B", "optimizer.lr": 3e-4, "training.local_batch_size": 1,
    },
    "0.1 70B, release": {
        **RELEASE, **FULL, **TP, "model.flavor": "70B", "optimizer.lr": 1.5e-4,
        "training.local_batch_size": 8,
    },
    "0.1 405B, release": {
        **RELEASE, **FULL, **TP, "model.flavor": "405B", "optimizer.lr": 8e-5,
        "training.local_batch_size": 2, "model.converters": ["float8"], "training.compile": True,
    },
    "0.2 debug": {
        **NEW, **SELECTIVE, "model.flavor": "debugmodel", "optimizer.lr": 8e-4,
        "training.local_batch_size": 8,
        "training.seq_len": 2048, "training.steps": 10, "lr_scheduler.warmup_steps": 2,
        "training.dataset": "c4_test",
    },
    "0.2 8B": {
        **NEW, **SELECTIVE, "model.flavor": "8B", "optimizer.lr": 3e-4, "training.local_batch_size": 1,
    },
    "0.2 8B flex": {
        **NEW, **FULL, "model.flavor": "8B_flex", "optimizer.lr": 3e-4, "training.local_batch_size": 1,
    },
    "0.2 70B": {
        **NEW, **FULL, **TP, "model.flavor": "70B", "optimizer.lr": 1.5e-4, "training.local_batch_size": 8,
    },
    "0.2 405B": {
        **NEW, **FULL, **TP, "model.flavor": "405B", "optimizer.lr": 8e-5, "training.local_batch_size": 2,
        "model.converters": ["quantize.linear.float8"],
    },
}  # fmt: skip


def write(folder: Path, keys: dict[str, Any]) -> Path:
    """A TOML file of dotted keys."""
    path = folder / "torchtitan.toml"
    words = {True: "true", False: "false"}
    lines = [f"{k} = {words[v] if isinstance(v, bool) else repr(v)}" for k, v in keys.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def result(folder: Path, keys: dict[str, Any]) -> tuple[Job, str, dict[str, list[str]]]:
    """The job, its text, and the keys of the report by kind."""
    text, report = migrate(write(folder, keys))
    (folder / "titanlite.toml").write_text(text)
    kinds: dict[str, list[str]] = {}
    for line in report.splitlines()[1:]:
        if head := re.fullmatch(r"([a-z ]+) \(\d+\):", line):
            kinds[head[1]] = []
        elif line.startswith("  "):
            list(kinds.values())[-1].append(re.match(r"  ([\w.]+)", line)[1])
    assert set(kinds) <= set(KINDS)
    return load_job(folder / "titanlite.toml", world_size=None), text, kinds


@pytest.mark.parametrize("file", FILES)
def test_torchtitans_files(file: str, tmp_path: Path) -> None:
    keys = FILES[file]
    job, text, kinds = result(tmp_path, keys)
    assert "titanlite refuses this" not in text, "`titanlite config` would fail"
    reported = [key for kind in kinds if kind != "default" for key in kinds[kind]]
    assert sorted(reported) == sorted(keys), "each once"
    assert "unknown" not in kinds
    c = job.model.config
    assert (c.dim, c.n_layers) == {
        "debug": (256, 6), "8B": (4096, 32), "70B": (8192, 80), "405B": (16384, 126)
    }[file.split()[1].strip(",")]  # fmt: skip
    assert c.rope_factor == (1.0 if file.startswith("0.1") else 8.0)
    assert job.optimizer.lr == keys["optimizer.lr"]
    assert job.training.steps == keys["training.steps"]
    assert job.training.seq_len == keys["training.seq_len"]
    old = file.startswith("0.1")
    theirs = "training.batch_size" if "training.batch_size" in keys else "training.local_batch_size"
    assert job.training.local_batch_size == keys[theirs]
    assert job.lr_scheduler.warmup_steps == keys["lr_scheduler.warmup_steps"]
    assert job.activation_checkpoint.mode == keys["activation_checkpoint.mode"]
    assert job.parallelism.tensor_parallel_degree == keys.get("parallelism.tensor_parallel_degree", 1)
    assert job.checkpoint.enable == (not old)
    assert job.compile.enable == (keys["training.compile"] if old else True)
    assert job.float8.enable == ("405B" in file)
    assert job.data.mask_documents == ("flex" in file)
    assert job.data.sources[0].path == [
        {"c4": "data/c4", "c4_test": "tests/assets/c4_test"}[keys["training.dataset"]]
    ]
    if old:
        assert job.tokenizer.path == keys["model.tokenizer_path"]
        assert (job.tokenizer.name, job.tokenizer.num_special_tokens) == ("tiktoken", 256)
    else:
        assert (job.tokenizer.name, job.tokenizer.path) == ("huggingface", keys["model.hf_assets_path"])
        assert (job.training.seed, job.validation.freq, job.lr_scheduler.decay_ratio) == (42, 500, 0.8)


def test_no_table_names_a_key_that_titanlite_lacks() -> None:
    ours = (ROOT / "tests/golden/public_keys.txt").read_text()
    known = set(re.sub(r"\[\w+\]", "", ours).split())
    named = {key for keys in ERAS.values() for key in (*keys.carried, *keys.renamed.values())}
    assert named <= known, named - known
    dropped = {key for keys in ERAS.values() for key in keys.gone}
    assert not dropped & known, "titanlite has a key of that name"


def test_every_flavor_loads(tmp_path: Path) -> None:
    for name, flavors in FLAVORS.items():
        for flavor in flavors:
            job, _, _ = result(tmp_path, {"model.name": name, "model.flavor": flavor})
            assert job.model.name == name
    job, _, _ = result(tmp_path, {"model.name": "qwen3", "model.flavor": "1.7B"})
    assert (job.model.flavor, job.model.overrides) == ("1.7B", {})


def test_what_torchtitan_would_take_for_what_is_missing(tmp_path: Path) -> None:
    job, text, kinds = result(tmp_path, {"training.steps": 5})
    assert job.optimizer.lr == 8e-4
    assert not job.checkpoint.enable
    assert (job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option) == (
        "selective",
        "2",
    )
    assert job.model.config.vocab_size == 2048
    assert "optimizer.lr" in kinds["default"]
    assert "# TO DO: tokenizer.path" in text
    assert "# TO DO: data.sources" in text


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"training.step": 5}, "unknown", "did you mean 'training.steps'?"),
        ({"my_section.thing": 5}, "unknown", "no key of torchtitan 0.1 or 0.2"),
        ({"activation_checkpoint.mood": "full"}, "unknown", "did you mean 'activation_checkpoint.mode'?"),
        ({"fault_tolerance.enable": True}, "no counterpart", "not supported"),
        ({"checkpoint.load_step": 0}, "no counterpart", "refused: 0 is neither -1 nor a step"),
        ({"training.steps": "many"}, "no counterpart", "refused: expected an integer, got 'many'"),
        ({"optimizer.name": "Adam"}, "no counterpart", "refused: unknown optimizer 'Adam'"),
        ({"model.converters": 3}, "no counterpart", "3 is no value for it"),
        ({"checkpoint.keep_latest_k": 1}, "replaced", "two at least"),
        ({"checkpoint.async_mode": "async_with_pinned_mem"}, "replaced", "pinned buffers"),
        ({"checkpoint.async_mode": "async"}, "carried over", ""),
        ({"validation.dataset": "c4_validation"}, "no counterpart", "validation is off"),
        ({"checkpoint.last_save_in_hf": False}, "renamed", "-> checkpoint.export_hf"),
        ({"training.data_parallel_degree": 2}, "renamed", "-> parallelism.data_parallel_shard_degree"),
        ({"training.fp8_linear": "dynamic"}, "replaced", "-> float8.enable"),
        ({"checkpoint.last_save_model_weights_only": True}, "no counterpart", "writes the weights alone"),
        (
            {"experimental.pipeline_parallel_schedule": "1f1b"},
            "replaced",
            "-> parallelism.pipeline_parallel_schedule",
        ),
    ],
    ids=str,
)
def test_what_becomes_of_a_key(tmp_path: Path, keys: dict[str, Any], kind: str, message: str) -> None:
    _, report = migrate(write(tmp_path, keys))
    result(tmp_path, keys)  # loads
    (key,) = keys
    lines = report.splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(rf"  {re.escape(key)}\b", line))
    heads = [line for line in itertools.islice(lines, at) if line.endswith("):")]
    assert heads[-1].startswith(kind)
    assert message in lines[at]


def test_values_that_are_replaced(tmp_path: Path) -> None:
    job, _, _ = result(
        tmp_path,
        {
            "training.dataset_path": "/data/mine", "training.dataset": "c4", "checkpoint.keep_latest_k": 1,
            "quantize.linear.float8.filter_fqns": ["attention.wk", "feed_forward.w2", "output"],
            "model.converters": ["quantize.linear.float8"], "compile.enable": True,
            "training.dataloader.num_workers": 3,
            "quantize.linear.float8.recipe_name": "rowwise",
        },
    )  # fmt: skip
    assert job.data.sources[0].path == ["/data/mine"]
    assert job.data.num_workers == 3
    assert job.checkpoint.keep_latest_k == 2
    assert job.float8.filter_fqns == ["self_attn.k_proj", "mlp.down_proj"]
    assert (job.float8.enable, job.float8.recipe, job.float8.enable_fsdp_float8_all_gather) == (
        True,
        "rowwise",
        False,
    )


def test_what_only_fails_as_a_whole_is_told(tmp_path: Path) -> None:
    text, report = migrate(write(tmp_path, FILES["0.2 8B"] | {"parallelism.context_parallel_degree": 3}))
    assert (
        "TO DO: parallelism.context_parallel_degree: on 3 ranks titanlite refuses this: training.seq_len = "
        in report
    )
    assert "# TO DO: parallelism.context_parallel_degree" in text


def test_activation_checkpointing_that_the_layout_does_not_allow_is_replaced(tmp_path: Path) -> None:
    job, text, kinds = result(tmp_path, FILES["0.2 405B"] | SELECTIVE)
    assert job.activation_checkpoint.mode == "full"
    assert "activation_checkpoint.mode" in kinds["replaced"]
    assert "titanlite refuses" not in text


def test_the_eras_are_told_apart(tmp_path: Path) -> None:
    for name, keys in FILES.items():
        assert era(keys) == name[:3]
    mixed = {"checkpoint.enable_checkpoint": True, "model.hf_assets_path": "x"}
    assert "between 0.1 and 0.2" in migrate(write(tmp_path, mixed))[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.name": "llama4"}, "model.name = 'llama4': titanlite has llama3 and qwen3"),
        ({"model.flavor": "9B"}, "model.flavor = '9B' (known: 405B, 70B, 8B"),
        ({"model.name": "qwen3", "model.flavor": "30B-A3B"}, "model.flavor = '30B-A3B'"),
    ],
)
def test_a_model_that_titanlite_lacks_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        migrate(write(tmp_path, keys))
    assert message in str(e.value)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path, FILES["0.2 8B"]), tmp_path / "out.toml"
    assert cli.run(["migrate", str(source), "-o", str(output)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{source}: torchtitan 0.2\ncarried over (")
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
    said = f"titanlite: {name} is a titanlite file already: `titanlite config {name}` checks it\n"
    assert capsys.readouterr() == ("", said)
    assert not Path("new.toml").exists()


def test_nothing_is_left_of_a_file_that_a_full_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path, FILES["0.2 8B"]), tmp_path / "new" / "out.toml"

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert cli.run(["migrate", str(source), "-o", str(output)]) == 2
    assert capsys.readouterr().err == f"titanlite: {output} cannot be written: No space left on device\n"
    assert list(output.parent.iterdir()) == []


def test_a_longer_sequence_than_the_flavor_is_made_for_is_carried_over(tmp_path: Path) -> None:
    keys = FILES["0.2 debug"] | {"training.seq_len": 4096}
    job, _, kinds = result(tmp_path, keys)
    assert (job.training.seq_len, job.model.config.max_position) == (4096, 4096)
    assert "model.overrides.max_position" in kinds["default"]
    job, _, kinds = result(tmp_path, FILES["0.2 8B"])
    assert "max_position" not in job.model.overrides


KEYS = json.loads((ROOT / "tests/golden/torchtitan_keys.json").read_text())  # with their defaults, by release


@pytest.mark.parametrize("release", KEYS)
def test_every_key_of_a_release_is_known(release: str) -> None:
    assert [key for key in KEYS[release] if became(key, None)[0].kind == "unknown"] == [
        "model.name",
        "model.flavor",
    ]
    assert era(dict.fromkeys(KEYS[release])) == release[:3]


def test_a_key_marks_the_releases_that_have_it() -> None:
    """A key of one release's table is in no other release, and one of the common table is in both; of
    sections that a pattern takes as a whole, none is a mark."""
    old, new = KEYS["0.1.0"].keys(), KEYS["0.2.0"].keys() | KEYS["0.2.1"].keys() | KEYS["0.2.2"].keys()
    patterns = [pattern for pattern in ERAS["0.1 or 0.2"].gone if "*" in pattern]
    for key in old | new:
        if any(fnmatchcase(key, pattern) for pattern in patterns):
            continue
        assert era({key: None}) == ("0.1 or 0.2" if key in old & new else "0.1" if key in old else "0.2"), key
    assert (KEYS["0.2.1"].keys() | KEYS["0.2.2"].keys()) - KEYS["0.2.0"].keys() == SINCE_0_2_1


@pytest.mark.parametrize("release", KEYS)
def test_a_default_that_is_left_out_is_as_if_it_were_written(release: str, tmp_path: Path) -> None:
    """For every key of the release at once, with float8 and validation on, where it has them."""
    written = {key: value for key, value in KEYS[release].items() if value is not None}
    switches: dict[str, Any] = {
        "0.1.0": {"model.converters": ["float8"], "training.compile": True},
    }.get(
        release,
        {"model.converters": ["quantize.linear.float8"], "compile.enable": True, "validation.enable": True},
    )
    full, _, _ = result(tmp_path, written | switches)
    bare, _, kinds = result(tmp_path, switches)
    assert full.float8.enable
    trees = [toml.as_tree(job) for job in (full, bare)]
    for tree in trees:
        tree["job"] = {}  # the run folder's name and a description
    assert trees[0] == trees[1]
    assert {
        "checkpoint.async_mode", "checkpoint.export_dtype", "comm.init_timeout_seconds",
        "comm.train_timeout_seconds", "data.num_workers", "profiling.profiler_warmup",
        "training.mixed_precision_param",
    } <= set(kinds["default"])  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "factor", "undecided"),
    [
        ({"checkpoint.enable_checkpoint": False}, 1.0, False),  # 0.1
        ({"training.compile": False, "training.local_batch_size": 8}, 1.0, False),
        ({"checkpoint.enable_checkpoint": False, "model.hf_assets_path": "x"}, 1.0, True),  # between
        ({"model.hf_assets_path": "x"}, 8.0, True),  # 0.2.0, or a checkout of the summer before it
        ({"training.local_batch_size": 8}, 8.0, True),
        ({"debug.seed": 1}, 8.0, False),  # 0.2.1 or later
    ],
)
def test_rope_is_scaled_as_the_release_scaled_it(
    tmp_path: Path, keys: dict[str, Any], factor: float, undecided: bool
) -> None:
    job, text, _ = result(tmp_path, keys)
    assert job.model.config.rope_factor == factor
    assert ("TO DO: model.overrides.rope_factor" in text) == undecided


def test_the_vocabulary_of_0_1_is_the_tokenizers(tmp_path: Path) -> None:
    old = {"checkpoint.enable_checkpoint": False}
    job, text, _ = result(tmp_path, {**old, "model.tokenizer_path": "./tests/assets/test_tiktoken.model"})
    assert job.model.config.vocab_size == 2256
    assert "vocab_size:" not in text
    job, text, _ = result(tmp_path, {**old, "model.tokenizer_path": str(tmp_path / "none.model")})
    assert job.model.config.vocab_size == 128256
    assert "# TO DO: model.overrides.vocab_size: torchtitan 0.1 takes it from the tokenizer, but" in text
    ranks = tmp_path / "mine.model"
    ranks.write_bytes((ROOT / "assets/tokenizer/stdlib.tiktoken").read_bytes())
    job, text, _ = result(tmp_path, {**old, "model.tokenizer_path": str(ranks)})
    assert job.model.config.vocab_size == Tiktoken(path=str(ranks), num_special_tokens=256).build().vocab_size
    assert "vocab_size:" not in text


def test_torchtitans_test_tokenizer_is_told(tmp_path: Path) -> None:
    for keys in ({}, {"model.hf_assets_path": "tests/assets/tokenizer"}):
        _, text, _ = result(tmp_path, keys)
        assert "torchtitan's test tokenizer, which titanlite refuses: BPE over characters" in text
    assert "test tokenizer" not in result(tmp_path, {"model.hf_assets_path": "./assets/hf/Llama-3.1-8B"})[1]


@pytest.mark.parametrize(
    ("keys", "local", "whole", "undecided"),
    [
        ({"training.local_batch_size": 8}, 1, 8, True),
        ({"training.local_batch_size": 8, "parallelism.data_parallel_shard_degree": 2}, 1, 16, False),
        ({"training.local_batch_size": 16, "parallelism.pipeline_parallel_microbatch_size": 2}, 2, 16, True),
        ({"training.local_batch_size": 8, "training.global_batch_size": 64}, 1, 64, False),
        ({"training.local_batch_size": 8, "training.global_batch_size": -1}, 1, 8, True),
        ({}, 1, 8, True),
    ],
)
def test_a_pipelines_micro_batches_are_carried_over(
    tmp_path: Path, keys: dict[str, Any], local: int, whole: int, undecided: bool
) -> None:
    pipeline = {
        "model.flavor": "8B", "training.steps": 1000, "parallelism.pipeline_parallel_degree": 4,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
    }  # fmt: skip
    job, text, _ = result(tmp_path, pipeline | keys)
    assert (job.training.local_batch_size, job.training.global_batch_size) == (local, whole)
    assert ("TO DO: training.global_batch_size" in text) == undecided
    assert "titanlite refuses" not in text.replace("which titanlite refuses: BPE", "")
    batch = BatchLayout.of(job.training, max(job.parallelism.data_parallel_shard_degree, 1))
    assert batch.num_micro_batches % 8 == 0


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["layers.0.feed_forward.w2"], ["layers.0.mlp.down_proj"]),
        (["feed_forward", "attention.wq"], ["mlp", "self_attn.q_proj"]),
        (["attention", "w1"], ["self_attn", "gate_proj"]),
        (["output"], []),
        (["layers.1.attention.w"], [f"model.layers.1.self_attn.{x}_proj" for x in "koqv"]),
    ],
    ids=str,
)
def test_float8_leaves_the_same_layers_alone(
    tmp_path: Path, theirs: list[str], ours: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"quantize.linear.float8.filter_fqns": theirs, "model.converters": ["quantize.linear.float8"]}
    job, _, _ = result(tmp_path, {**keys, "compile.enable": True})
    assert job.float8.filter_fqns == ours
    assert cli.run(["config", str(tmp_path / "titanlite.toml")]) == 0
    assert capsys.readouterr().err == ""


def test_a_filter_without_counterpart_is_told(tmp_path: Path) -> None:
    keys = {
        "quantize.linear.float8.filter_fqns": ["auto_filter_small_kn", "output"], "compile.enable": True,
        "model.converters": ["quantize.linear.float8"],
    }  # fmt: skip
    text, report = migrate(write(tmp_path, keys))
    assert "auto_filter_small_kn has no counterpart, float8.min_elements is the nearest" in report
    assert "# TO DO: float8.min_elements: torchtitan's auto_filter_small_kn leaves" in text


def test_a_warmup_as_long_as_the_run_is_all_of_it(tmp_path: Path) -> None:
    """As torchtitan shortens it."""
    job, _, kinds = result(tmp_path, {"training.steps": 10, "lr_scheduler.warmup_steps": 200})
    factors = [job.lr_scheduler.factor(step, job.training.steps) for step in range(1, 11)]
    assert factors == pytest.approx([step / 10 for step in range(1, 11)])
    assert "lr_scheduler.warmup_steps" in kinds["replaced"]
    assert result(tmp_path, {"training.steps": 10})[0].lr_scheduler == job.lr_scheduler


def test_what_differs_whatever_the_file_says_is_told(tmp_path: Path) -> None:
    report = migrate(write(tmp_path, {"training.steps": 10}))[1]
    assert "NOTE: optimizer.weight_decay: titanlite does not decay norms, torchtitan does" in report


def test_an_expert_models_name_suggests_no_dense_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        migrate(write(tmp_path, {"model.name": "qwen3", "model.flavor": "debugmodel_moe"}))
    assert "did you mean" not in str(e.value)


def test_keys_are_flattened() -> None:
    assert dict(flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [2]})) == {"a.b.c": 1, "a.d": {}, "e": [2]}
