"""`titanlite migrate`: every key of a torchtitan file is in the report, under what became of it, and the
result is a job with its values."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.job import Job, load_job
from titanlite.tools.migrate import KINDS, became, flatten, migrate
from titanlite.tools.torchtitan import ERAS, FLAVORS

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
    job, _, kinds = result(tmp_path, keys)
    reported = [key for kind in kinds if kind != "default" for key in kinds[kind]]
    assert sorted(reported) == sorted(keys), "each once"
    assert "unknown" not in kinds
    c = job.model.config
    assert (c.dim, c.n_layers) == {
        "debug": (256, 6), "8B": (4096, 32), "70B": (8192, 80), "405B": (16384, 126)
    }[file.split()[1]]  # fmt: skip
    assert c.rope_factor == (1.0 if file.startswith("0.1") else 8.0)
    assert job.optimizer.lr == keys["optimizer.lr"]
    assert job.training.steps == keys["training.steps"]
    assert job.training.seq_len == keys["training.seq_len"]
    old = file.startswith("0.1")
    assert (
        job.training.local_batch_size == keys["training.batch_size" if old else "training.local_batch_size"]
    )
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
    assert job.float8.filter_fqns == ["k_proj", "down_proj"]
    assert (job.float8.enable, job.float8.recipe, job.float8.enable_fsdp_float8_all_gather) == (
        True,
        "rowwise",
        False,
    )


def test_what_only_fails_as_a_whole_is_told(tmp_path: Path) -> None:
    by_operation = {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    }
    text, report = migrate(write(tmp_path, FILES["0.2 405B"] | by_operation))
    assert (
        "TO DO: activation_checkpoint.selective_ac_option: on 8 ranks titanlite refuses this: 'op', parts of"
        in report
    )
    assert "# TO DO: activation_checkpoint.selective_ac_option" in text


def test_the_eras_are_told_apart(tmp_path: Path) -> None:
    for name, keys in FILES.items():
        assert migrate(write(tmp_path, keys))[1].splitlines()[0].endswith(f": torchtitan {name[:3]}")
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


def test_a_longer_sequence_than_the_flavor_is_made_for_is_carried_over(tmp_path: Path) -> None:
    keys = FILES["0.2 debug"] | {"training.seq_len": 4096}
    job, _, kinds = result(tmp_path, keys)
    assert (job.training.seq_len, job.model.config.max_position) == (4096, 4096)
    assert "model.overrides.max_position" in kinds["default"]
    job, _, kinds = result(tmp_path, FILES["0.2 8B"])
    assert "max_position" not in job.model.overrides


def test_every_key_of_torchtitan_is_known() -> None:
    """All that 0.2.2 had."""
    keys = (ROOT / "tests/golden/torchtitan_0_2_2_keys.txt").read_text().split()
    assert len(keys) == 149
    assert [key for key in keys if became(key, None)[0].kind == "unknown"] == ["model.flavor", "model.name"]


def test_keys_are_flattened() -> None:
    assert dict(flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [2]})) == {"a.b.c": 1, "a.d": {}, "e": [2]}
