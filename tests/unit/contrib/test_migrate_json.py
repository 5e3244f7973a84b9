"""`titanlite migrate` of the JSON that torchtitan 0.3's trainer writes: each test changes a file that has the
keys of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.torchtitan_table import KEYS
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.config.overrides import put
from titanlite.contrib.migrate import migrate, migrate_key
from titanlite.job import Job, load_job

ADAMW = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
ALL = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": ADAMW}
INIT = {"weight": "functools.partial(<function trunc_normal_ at 0x7f3f8508d120>, std=0.02)"}


def module(**fields: Any) -> dict[str, Any]:
    return {"param_init": None, "sharding_config": None, **fields}


def linear(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    return module(in_features=columns, out_features=rows, bias=False, **more) | {"param_init": INIT}


def norm(dim: int, eps: float) -> dict[str, Any]:
    return module(normalized_shape=dim, eps=eps, elementwise_affine=True)


def experts(**changes: Any) -> dict[str, Any]:
    """The part of a layer that differs in a Qwen3 with experts."""
    inner = module(dim=256, hidden_dim=768, num_experts=64)
    router = module(
        num_experts=64, gate=linear(64, 256), num_expert_groups=None, num_limited_groups=None, top_k=8,
        score_func="softmax", route_norm=True, route_scale=1.0,
    )  # fmt: skip
    routed = module(inner_experts=inner, token_dispatcher={"num_experts": 64, "top_k": 8, "comm": "deepep"})
    moe = module(num_experts=64, routed_experts=routed, router=router, shared_experts=None)
    return {"feed_forward": None, "moe": moe | {"load_balance_coeff": 0.001} | changes}


def model(
    name: str, num_layers: int, dim: int, heads: tuple[int, int, int], hidden: int, **layer: Any
) -> dict[str, Any]:
    """The model of a file. `heads`: of queries, of keys, and their size."""
    num, num_kv, size = heads
    eps, llama = (1e-5 if name == "llama3" else 1e-6), name == "llama3"
    rope = module(
        dim=size, max_seq_len=131072 if llama else 4096, theta=500000 if llama else 1e6,
        scaling="llama" if llama else "none", scaling_factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192, rope_factor=1.0, beta_fast=32.0, beta_slow=1.0,
        original_seq_len=4096, truncate=True,
    )  # fmt: skip
    qkv = module(head_dim=size, n_heads=num, n_kv_heads=num_kv, wqkv=linear((num + 2 * num_kv) * size, dim))
    attention = module(
        n_heads=num, inner_attention=module(block_size=128, kernel_options={}), dim=dim, qkv_linear=qkv,
        wo=linear(dim, num * size), qk_norm=None if llama else norm(size, eps), rope=rope,
        n_kv_heads=None if num_kv == num else num_kv, head_dim=None if llama else size,
    )  # fmt: skip
    mlp = module(w1=linear(hidden, dim), w2=linear(dim, hidden), w3=linear(hidden, dim))
    one = module(attention=attention, feed_forward=mlp, moe=None) | layer
    one |= {"attention_norm": norm(dim, eps), "ffn_norm": norm(dim, eps)}
    vocabulary = 128256 if num_layers == 32 else 2048
    return module(
        dim=dim, vocab_size=vocabulary, lm_head=linear(vocabulary, dim), norm=norm(dim, eps),
        tok_embeddings=module(num_embeddings=vocabulary, embedding_dim=dim), enable_weight_tying=False,
        layers=[json.loads(json.dumps(one)) for _ in range(num_layers)],
    )  # fmt: skip


LLAMA_8B = ("llama3", 32, 4096, (32, 8, 128), 14336)
DEBUG = ("llama3", 6, 256, (16, 16, 16), 768)
QWEN = ("qwen3", 8, 256, (16, 8, 128), 3072)


def config(shape: tuple[Any, ...] = LLAMA_8B, flavor: str = "8B", **layer: Any) -> dict[str, Any]:
    """A file's tree with the settings of torchtitan's own 8B, and its defaults elsewhere."""
    own = {"dataloader.sources", "dataloader.seed", "dataloader.stopping_strategy", "loss.global_vocab_size"}
    own |= {
        "dataloader.sample_processor",
        "activation_checkpoint",
        "loss",
        "activation_checkpoint.memory_budget",
    }
    own |= {"activation_checkpoint.visualize_memory_budget_pareto"}
    tree: dict[str, Any] = {
        "model_spec": {"name": shape[0], "flavor": flavor, "model": model(*shape, **layer)},
        "tokenizer": {},
    }
    settings = KEYS["0.3.0"] | {
        "hf_assets_path": "./assets/hf/Llama-3.1-8B", "profiler.enable_profiling": True,
        "profiler.profile_freq": 100, "metrics.enable_tensorboard": True, "training.local_batch_size": 1,
        "training.seq_len": 8192, "training.steps": 1000, "dataloader.dataset": "c4", "validator.freq": 500,
        "validator.steps": 1200, "optimizer.param_groups": [ALL],
    }  # fmt: skip
    if shape is not LLAMA_8B:
        settings["training.seq_len"] = 2048
    for key, value in settings.items():
        if key not in own and not key.startswith(("dataloader.load_dataset", "optimizer.optimizer_factory")):
            put(tree, key, value)
    return tree


def result(folder: Path, tree: dict[str, Any]) -> tuple[Job, str, list[str]]:
    """The job, its text and its TO DO lines, without those that every file has."""
    source = folder / "config.json"
    source.write_text(json.dumps(tree, indent=2))
    text, todo = migrate(source)
    (folder / "titanlite.toml").write_text(text)
    always = ("float8.enable: the JSON does not tell", "data.sources: put", "optimizer.weight_decay: titan")
    assert [line for line in always if not any(t.startswith(line) for t in todo)] == []
    return (
        load_job(folder / "titanlite.toml", world_size=None), text,
        [line for line in todo if not line.startswith(always)],
    )  # fmt: skip


def test_torchtitans_8b(tmp_path: Path) -> None:
    tree = config()
    job, text, todo = result(tmp_path, tree)
    assert todo == []
    assert (job.model.name, job.model.flavor, job.model.overrides) == ("llama3", "8B", {})
    training, optimizer, schedule = job.training, job.optimizer, job.lr_scheduler
    assert (training.local_batch_size, training.global_batch_size, training.seq_len) == (1, -1, 8192)
    assert (training.steps, training.max_norm, training.mixed_precision_param) == (1000, 1.0, "bfloat16")
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", 3e-4, 0.1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)
    assert (schedule.warmup_steps, schedule.decay_type, schedule.min_lr_factor) == (200, "linear", 0.0)
    assert (job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option) == (
        "selective",
        "op",
    )
    assert (job.compile.enable, job.float8.enable, job.float8.recipe) == (False, False, "rowwise")
    assert (job.checkpoint.enable, job.checkpoint.interval, job.checkpoint.keep_latest_k) == (False, 500, 10)
    assert (job.validation.enable, job.validation.freq, job.validation.steps) == (False, 500, 1200)
    assert (job.profiling.enable_profiling, job.profiling.profile_freq) == (True, 100)
    assert (job.data.sources[0].path, job.data.mask_documents, job.data.num_workers) == (["c4"], True, 0)
    assert (job.tokenizer.name, job.tokenizer.path) == ("huggingface", "./assets/hf/Llama-3.1-8B")
    assert (job.loss.name, [sink.name for sink in job.metrics.sinks]) == (
        "chunked_cross_entropy",
        ["tensorboard"],
    )
    assert job.comm.train_timeout_seconds == 100
    # Every key has one line.
    lines = text.partition("\n\n")[0].splitlines()
    keys = [
        key for key in KEYS["0.3.0"] if key.split(".")[0] in ("training", "parallelism", "validator", "comm")
    ]
    for key in (*keys, "model_spec.name", "model_spec.model", "optimizer.param_groups", "loss.num_chunks"):
        assert sum(line.startswith(f"# {key} ") for line in lines) == 1, key


def test_what_differs_from_the_flavor_is_an_override(tmp_path: Path) -> None:
    tree = config()
    del tree["model_spec"]["model"]["layers"][8:]
    tree["model_spec"]["model"]["enable_weight_tying"] = True
    for layer in tree["model_spec"]["model"]["layers"]:
        layer["attention"]["rope"] |= {"theta": 1e6, "scaling_factor": 32.0}
    job, _, todo = result(tmp_path, tree)
    assert (job.model.flavor, todo) == ("8B", [])
    assert job.model.overrides == {
        "n_layers": 8, "tie_word_embeddings": True, "rope_theta": 1e6, "rope_factor": 32.0,
    }  # fmt: skip
    config_ = result(tmp_path, config(DEBUG, "mine"))[0].model.config
    assert (config_.dim, config_.n_layers, config_.n_heads, config_.n_kv_heads) == (256, 6, 16, 16)
    assert (config_.head_dim, config_.hidden_dim, config_.vocab_size) == (16, 768, 2048)
    assert (config_.rope_factor, config_.tie_word_embeddings, config_.norm_eps) == (8.0, False, 1e-5)


def test_qwen3_with_and_without_experts(tmp_path: Path) -> None:
    job, _, todo = result(tmp_path, config(QWEN, "debugmodel"))
    assert (job.model.name, job.model.config.rope_factor, job.model.config.max_position) == (
        "qwen3",
        1.0,
        4096,
    )
    assert todo == []
    job, _, todo = result(tmp_path, config(QWEN, "debugmodel_moe", **experts()))
    c = job.model.config
    assert (job.model.name, c.n_experts, c.n_experts_per_token, c.moe_hidden_dim) == ("qwen3_moe", 64, 8, 768)
    assert (c.norm_topk_prob, job.moe.load_balance, len(todo)) == (True, "global", 1)
    assert todo[0].startswith("moe.load_balance: torchtitan 0.3 balances its qwen3 by a bias of the router")
    job, _, todo = result(tmp_path, config(QWEN, "debugmodel_moe", **experts(load_balance_coeff=None)))
    assert (job.moe.load_balance, todo) == ("none", [])


@pytest.mark.parametrize(
    ("section", "mode"),
    [
        (None, "none"),
        ({"debug": False}, "full"),
        ({"debug": False, "force_recompute_mm_shapes_by_fqns": []}, "selective"),
        ({"debug": False, "memory_budget": 0.25}, "memory_budget"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_keys_tell_the_policy_of_activation_checkpointing(
    tmp_path: Path, section: dict[str, Any] | None, mode: str
) -> None:
    tree = config() | {"activation_checkpoint": section}
    tree["compile"]["enable"] = True
    job, _, todo = result(tmp_path, tree)
    assert (job.activation_checkpoint.mode, todo) == (mode, [])
    assert job.activation_checkpoint.memory_budget == (0.25 if mode == "memory_budget" else 0.5)


def test_the_keys_tell_loss_attention_and_sources(tmp_path: Path) -> None:
    tree = config() | {"loss": {"global_vocab_size": 128256}}
    for layer in tree["model_spec"]["model"]["layers"]:
        layer["attention"]["inner_attention"] = module()  # scaled_dot_product_attention
    sources = [{"dataset": "c4", "dataset_path": None, "infinite": True, "weight": 3}]
    sources.append({"dataset": "c4", "dataset_path": "/mine", "infinite": True, "weight": 1})
    tree["dataloader"] |= {"dataset": "", "sources": sources, "seed": 42}
    job, text, todo = result(tmp_path, tree)
    assert (job.loss.name, job.data.mask_documents, todo) == ("cross_entropy", False, [])
    assert [(source.path, source.weight) for source in job.data.sources] == [(["c4"], 3.0), (["/mine"], 1.0)]
    assert "# TO DO: data.sources: put the text into /mine, or name other files" in text
    assert (job.data.validation_sources, "c4_validation': validation is off" in text) == ([], True)
    tree["validator"]["enable"] = True
    assert result(tmp_path, tree)[0].data.validation_sources[0].path == ["c4_validation"]
    _, text, todo = result(tmp_path, tree | {"loss": {"coefficient": 0.3}})
    assert any(line.startswith("loss = 'other': titanlite has cross-entropy") for line in todo)
    assert "# TO DO: loss.coefficient = 0.3: no key of torchtitan 0.1 to 0.3" in text


def test_muon_and_groups_of_parameters(tmp_path: Path) -> None:
    muon = {"pattern": r"\.w[123]\.", "optimizer_name": "DistMuon"}
    muon["optimizer_kwargs"] = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.9}
    other = {"pattern": "norm", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-3, "amsgrad": True}}
    tree = config()
    tree["optimizer"] |= {"param_groups": [muon, other, ALL], "implementation": "fused_opt_states_bf16"}
    job, _, todo = result(tmp_path, tree)
    optimizer = job.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("muon", 0.02, 0.05)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.adjust_lr_fn) == (0.9, True, "original")
    assert (optimizer.ns_coefficients, optimizer.ns_steps, optimizer.state_dtype) == ("jordan", 5, "bfloat16")
    assert optimizer.lr * optimizer.adamw_lr_multiplier == pytest.approx(3e-4)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.95)
    assert [line.split(": ", 1)[1].split(",")[0] for line in todo] == [
        r"DistMuon has the parameters of '\\.w[123]\\.'", "AdamW's weight_decay = 0.1",
        "'norm' has AdamW with {'lr': 0.001", "titanlite has no amsgrad = True",
    ]  # fmt: skip
    muon["optimizer_kwargs"] |= {"adjust_lr_fn": "spectral_unclamped", "ns_coefficients": [3.0, -3.2, 1.2]}
    job, _, todo = result(tmp_path, tree)
    assert job.optimizer.adjust_lr_fn == "spectral"
    assert any("titanlite has no ns_coefficients = [3.0, -3.2, 1.2]" in line for line in todo)
    tree["optimizer"]["param_groups"] = [muon]
    assert "no group has the pattern '.*': set optimizer" in result(tmp_path, tree)[2][0]


CHANGES = [
    ("training.dtype", "bfloat16", "training.dtype = 'bfloat16': not supported"),
    ("override.imports", ["mine.fused"], "override.imports = ['mine.fused']: not supported"),
    ("dataloader.infinite", False, "dataloader.infinite = False: max_epochs of a source ends its data"),
    ("dataloader.sample_processor", "<f>", "dataloader.sample_processor = '<f>': the source `chat` reads"),
    ("training.mine", 5, "training.mine = 5: no key of torchtitan 0.1 to 0.3"),
    ("mine.thing", None, "mine.thing = None: no key of torchtitan 0.1 to 0.3"),
    ("parallelism.pipeline_parallel_degree", 2, "training.local_batch_size: torchtitan splits"),
    ("optimizer.param_groups", [ALL | {"optimizer_name": "Adam"}], "optimizer.name: titanlite refuses this"),
    ("optimizer.param_groups", [{"pattern": ".*"}], "optimizer.param_groups: cannot be read: KeyError"),
]


@pytest.mark.parametrize(("key", "value", "line"), CHANGES, ids=[key for key, _, _ in CHANGES])
def test_what_would_change_training_silently_is_to_do(
    tmp_path: Path, key: str, value: Any, line: str
) -> None:
    tree = config()
    put(tree, key, value)
    source = tmp_path / "config.json"
    source.write_text(json.dumps(tree))
    assert any(said.startswith(line) for said in migrate(source)[1]), line


def test_switches_are_renamed() -> None:
    made, _, undecided = migrate_key("compile.enable_async_tensor_parallel", True)
    assert (list(made.values()), undecided) == ([True], False)


def other_layer(tree: dict[str, Any]) -> None:
    tree["model_spec"]["model"]["layers"][5]["attention"]["rope"]["theta"] = 1e4


def yarn(tree: dict[str, Any]) -> None:
    for layer in tree["model_spec"]["model"]["layers"]:
        layer["attention"]["rope"]["scaling"] = "yarn"


def lora(tree: dict[str, Any]) -> None:
    for layer in tree["model_spec"]["model"]["layers"]:
        layer["attention"]["wo"] |= {"rank": 8, "bias": True}


def test_layers_that_titanlite_does_not_have_are_named(tmp_path: Path) -> None:
    tree = config()
    lora(tree)
    _, _, todo = result(tmp_path, tree)
    assert todo == [
        "model.overrides: titanlite's llama3 has no attention.wo.bias = True, attention.wo.rank = 8; LoRA is "
        "the section [lora]"
    ]


REFUSED: list[tuple[Any, str]] = [
    (
        lambda tree: tree["model_spec"].update(name="gpt_oss"),
        "'gpt_oss': only llama3 and qwen3 can be migrated",
    ),
    (other_layer, "config.json: model_spec.model: its layers differ; titanlite's llama3 has equal ones"),
    (yarn, "config.json: model_spec.model: rope.scaling = 'yarn' is neither 'llama' nor 'none'"),
    (lambda tree: tree["model_spec"].update(name=[]), "model_spec.name = []: only llama3 and qwen3 can"),
    (lambda tree: tree["model_spec"].update(name="qwen3"), "titanlite's qwen3 has other layers"),
    (
        lambda tree: tree["model_spec"]["model"].pop("norm"),
        "model_spec.model cannot be read: KeyError: 'norm'",
    ),
    (lambda tree: tree["model_spec"].update(model=None), "config.json: model_spec.model: it has no layers"),
    (
        lambda tree: tree["model_spec"]["model"].update(layers=[]),
        "model_spec.model: it has no layers",
    ),
    (
        lambda tree: tree.pop("model_spec"),
        "config.json has no model_spec: it is not the JSON that torchtitan",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_file_that_cannot_be_migrated_is_refused_in_one_line(
    tmp_path: Path, change: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = config()
    change(tree)
    source = tmp_path / "config.json"
    source.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as error:
        migrate(source)
    assert message in str(error.value)
    assert cli.run(["migrate", str(source), "-o", str(tmp_path / "new.toml")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "new.toml").exists()


@pytest.mark.parametrize("text", ["{", '{"model_spec": 3', "[1, 2]", "\x00\x01", "<html>", "{" * 100_000])
def test_a_file_that_is_neither_json_nor_toml_is_refused_in_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "file"
    source.write_text(text)
    assert cli.run(["migrate", str(source)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(source) in err
