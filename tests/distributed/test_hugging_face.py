"""On every layout, the logits of a model from a Hugging Face directory equal those of transformers at every
position, and so do those of the directory that a run exports: with biases, windows and scaled rotary
frequencies, over more tokens than the window and than the length before the scaling."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gradients import build
from tests.support.layouts import COMPILED
from tests.support.models import family, hugging_face, keys_of, row
from tests.support.runs import CP, FOUR_MICRO_BATCHES, PP, TP, train_on_rank
from tests.support.tiers import full, sampled
from titanlite import cli
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.weights import load_weights
from titanlite.models.base import ModelFamily
from titanlite.torch_compat import compilations

transformers = pytest.importorskip("transformers")

WINDOW = {"sliding_window": 20}
LLAMA3 = {"rope_factor": 8.0, "rope_original_max_position": 16, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_max_position": 16, "rope_theta": 1e4}
UNTIED = {"tie_word_embeddings": False}
MODELS = {
    "llama, llama3": family(**LLAMA3),
    "llama, linear": family(**LINEAR, **UNTIED),
    "llama, yarn": family(**YARN, **UNTIED),
    "qwen2, yarn": family("qwen2", **YARN, **UNTIED),
    "qwen2, window": family("qwen2", **WINDOW),
    "qwen3, yarn": family("qwen3", head_dim=16, **YARN, **UNTIED),
    "qwen3, window, linear": family("qwen3", **WINDOW, **LINEAR, **UNTIED),
    "mistral, window": family("mistral", **WINDOW, **UNTIED),
    "mistral, window, llama3": family("mistral", **WINDOW, **LLAMA3),
    "gemma3, linear": family(
        "gemma3", head_dim=16, layer_pattern="SL", query_pre_attn_scalar=24, **WINDOW, **LINEAR
    ),
    "olmo3, yarn": family("olmo3", layer_pattern="SL", **WINDOW, **YARN),
}
# What makes a difference in each model: the fields to change, or the end of the names of weights to zero.
CONTROLS: dict[str, dict[str, Any] | str] = {
    "llama, llama3": {"rope_factor": 1.0},
    "llama, linear": {"rope_factor": 2.0},
    "llama, yarn": {"rope_attention_factor": 1.0},
    "qwen2, yarn": {"rope_type": "linear"},
    "qwen2, window": "v_proj.bias",
    "qwen3, yarn": {"rope_original_max_position": 32},
    "qwen3, window, linear": {"sliding_window": 21},
    "mistral, window": {"sliding_window": 0},
    "mistral, window, llama3": {"sliding_window": 19},
    "gemma3, linear": {"window_rope_theta": 1e3},
    "olmo3, yarn": {"window_rope_scaled": True},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard 2": (2, {}),
    "tp 2": (2, {"tp": 2}),
    "cp 2": (2, {"cp": 2}),
    "pp 2": (2, {"pp": 2}),
    "dp_replicate 2 x dp_shard 2": (4, {"dp_replicate": 2}),
    "tp 2 x cp 2": (4, {"tp": 2, "cp": 2}),
    "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
    "pp 2 x cp 2": (4, {"pp": 2, "cp": 2}),
    "dp_shard 2, compiled": (2, {"compile": "aot_eager"}),
    "tp 2, compiled": (2, {"tp": 2, "compile": "aot_eager"}),
    "cp 2, compiled": (2, {"cp": 2, "compile": "aot_eager"}),
    "pp 2, compiled": (2, {"pp": 2, "compile": "aot_eager"}),
}


def logits_on_rank(folder: Path, models: dict[str, ModelFamily], layout: dict[str, Any]) -> dict[str, Any]:
    """The logits on a layout of models in Hugging Face directories. Compiled blocks run compiled, although
    samples of a run do not."""
    logits = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "set_stance", lambda stance: nullcontext())
        for name, model in models.items():
            tied = model.config.tie_word_embeddings and "pp" not in layout
            options = {"family": model.name, "shape": {**model.overrides, "tie_word_embeddings": tied}}
            sharded = build(dist.get_world_size(), dist.get_rank(), **options, **layout)
            weights = open_hugging_face(folder / name)
            tensors = {"lm_head.weight": weights.tensors["model.embed_tokens.weight"], **weights.tensors}
            load_weights(replace(weights, tensors=tensors), sharded.net)
            num_compiled = len(compilations())
            logits[name] = sharded.logits(row(62))
            assert ("compile" in layout) == (len(compilations()) > num_compiled)
    return logits


def changed(name: str) -> tuple[ModelFamily, str]:
    """The model with other fields, and the end of the names of the weights to zero, if there are any."""
    model, control = MODELS[name], CONTROLS[name]
    if isinstance(control, str):
        return model, control
    overrides = model.overrides | control
    return replace(model, overrides=overrides), ""


@pytest.mark.parametrize("layout", sampled(LAYOUTS, {}))
@torch.no_grad()
def test_logits_of_an_import_are_those_of_transformers(tmp_path: Path, run_on, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    wanted = {}
    for name, model in MODELS.items():
        theirs = hugging_face(model)
        theirs.save_pretrained(tmp_path / name)
        wanted[name] = theirs(row(62)).logits
    for rank in run_on(world_size, logits_on_rank, tmp_path, MODELS, options):
        for name, logits in rank.items():
            assert (logits - wanted[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("layout", [full("cp 2"), full("tp 2")])
@torch.no_grad()
def test_control_a_changed_field_or_bias_is_noticed(tmp_path: Path, run_on, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    wanted = {}
    for name, model in MODELS.items():
        theirs = hugging_face(model)
        wanted[name] = theirs(row(62)).logits
        for weight, parameter in theirs.named_parameters():
            if CONTROLS[name] == ".".join(weight.split(".")[-2:]):
                parameter.zero_()
        theirs.save_pretrained(tmp_path / name)
    models = {name: changed(name)[0] for name in MODELS}
    for name, logits in run_on(world_size, logits_on_rank, tmp_path, models, options)[0].items():
        difference = (logits - wanted[name]).abs().amax((0, 2))
        assert difference.max() > 1e-2, name
        if "sliding_window" in CONTROLS[name]:  # the first tokens see all earlier ones
            assert difference[:19].max() < 1e-4, name


# ---- export

HSDP = ["--parallelism.data_parallel_replicate_degree=2", FOUR_MICRO_BATCHES]
RUNS: dict[
    str, tuple[int, list[str]]
] = {  # each model on one layout; an export does not depend on the layout
    "llama, llama3": (2, COMPILED),
    "llama, linear": (2, [PP]),
    "llama, yarn": (4, [PP, CP]),
    "qwen2, yarn": (4, [PP, TP]),
    "qwen2, window": (2, [TP]),
    "qwen3, yarn": (4, HSDP),
    "qwen3, window, linear": (4, [TP, CP]),
    "mistral, window": (2, []),
    "mistral, window, llama3": (2, [CP]),
    "gemma3, linear": (4, [TP, CP]),
    "olmo3, yarn": (4, [PP, TP]),
}


def read(folder: Path, **changes: Any) -> Any:
    """transformers' model of a directory, with changes to its config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", sampled(RUNS, {}))
@torch.no_grad()
def test_logits_of_an_export_are_those_of_transformers(
    tmp_path: Path, corpus: Path, run_on, name: str
) -> None:
    """A run on a layout begins with weights from transformers, trains one step that moves no weight, and
    exports."""
    world_size, layout = RUNS[name]
    theirs = hugging_face(MODELS[name])
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = theirs(row(62)).logits
    overrides = [
        f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", "--optimizer.lr=1e-30", "--training.steps=1",
        *keys_of(MODELS[name]), *layout,
    ]  # fmt: skip
    run_on(world_size, train_on_rank, tmp_path, corpus, overrides, "run", world_size)
    exported = tmp_path / "exported"
    assert cli.run(["export", str(tmp_path / "run"), str(exported), "--dtype=float32"]) == 0
    assert torch.equal(read(exported)(row(62)).logits, wanted)
    config = MODELS[name].config
    if config.rope_factor != 1.0:
        plain = {"rope_type": "default", "rope_theta": config.rope_theta}
        other = read(exported, rope_scaling=None, rope_parameters=plain)
    else:
        layers = {"layer_types": None} if "qwen" in name else {}
        other = read(exported, sliding_window=None, use_sliding_window=False, **layers)
    assert (other(row(62)).logits - wanted).abs().max() > 1e-2
