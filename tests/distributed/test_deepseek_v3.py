"""DeepSeek-V3 on every layout: the gradient of one step, and the weights and the correction bias after five,
are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gradients import gradients, on_rank
from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import COMPILED
from tests.support.runs import FOUR_MICRO_BATCHES, UNTIED, train_on_rank
from tests.support.tiers import full, sampled
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.job import Job
from titanlite.train import train

SHAPE = {
    "n_kv_heads": 4, "head_dim": 12, "rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 12,
    "kv_lora_rank": 16, "n_experts": 8, "n_experts_per_token": 2, "moe_hidden_dim": 24,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_factor": 4.0, "rope_original_max_position": 4, "rope_attention_factor": 1.0,
    "rope_mscale_all_dim": 1.0,
}  # fmt: skip
FAMILY: dict[str, Any] = {"family": "deepseek_v3", "shape": {**SHAPE, **YARN}}


def assert_same(actual: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    prefix = "model.layers.1."
    assert actual.keys() == whole.keys()
    assert {f"{prefix}self_attn.q_a_layernorm.weight", f"{prefix}mlp.shared_experts.up_proj.weight"} <= set(
        whole
    )
    for name, value in whole.items():
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        full(2, {}), full(2, {"cp": 2}), full(4, {"dp_replicate": 2}), full(4, {"cp": 2}),
        full(2, {"activation_checkpoint": "full"}), full(2, {"activation_checkpoint": "selective"}),
        full(2, {"activation_checkpoint": "selective", "ac_option": "attention+mlp"}),
        full(2, {"compile": "aot_eager"}),
        full(2, {"compile": "aot_eager", "activation_checkpoint": "selective"}),
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_on_every_layout(run_on, world_size: int, layout: dict[str, Any]) -> None:
    micro_batches = 1 if world_size == 4 else 2
    actual = run_on(world_size, on_rank, world_size, micro_batches, {**FAMILY, **layout})[0]
    assert_same(actual, gradients(1, 0, 1, **FAMILY))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_gradient_is_the_same_in_a_pipeline(run_on, schedule: str) -> None:
    layout = {"tied": False, "layers": 4, **FAMILY}
    parts = run_on(4, on_rank, 4, 2, {"pp": 2, "schedule": schedule, **layout})
    assert_same({name: value for part in parts for name, value in part.items()}, gradients(1, 0, 1, **layout))


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8(run_on, recipe: str) -> None:
    """Attention, shared experts and dense blocks compute in 8 bits, with the same gradients with FSDP."""
    sizes = {"head_dim": 32, "rope_head_dim": 16, "v_head_dim": 8, "q_lora_rank": 16, "moe_hidden_dim": 32}
    family = {**FAMILY, "shape": {**FAMILY["shape"], **sizes, "kv_lora_rank": 32}}
    layout = {"float8": recipe, **family}
    whole = gradients(1, 0, 2, **layout)
    assert not torch.allclose(whole["loss"], gradients(1, 0, 2, **family)["loss"], rtol=1e-7)
    assert_same(run_on(2, on_rank, 2, 1, layout)[0], whole)


# ---- whole runs

MODEL = [
    "--model.name=deepseek_v3",
    *(f"--model.overrides.{key}={value}" for key, value in SHAPE.items()),
    *(UNTIED, FOUR_MICRO_BATCHES, "--checkpoint.interval=5", "--moe.load_balance=bias"),
]
MULTI_TOKEN = "--model.overrides.n_mtp_layers=1"
RUNS: dict[str, tuple[int, list[str]]] = {
    "FSDP 2": (2, []),
    "HSDP 2 x 2": (4, ["--parallelism.data_parallel_replicate_degree=2"]),
    "FSDP 2, Muon": (2, ["--optimizer.name=muon"]),
    "FSDP 2, document masks": (2, ["--data.packing=best_fit", "--data.mask_documents=true"]),
    "FSDP 2, compiled, op": (2, [*COMPILED, "--activation_checkpoint.mode=selective"]),
    "CP 2 x FSDP 2": (4, ["--parallelism.context_parallel_degree=2"]),
    "PP 2 x FSDP 2": (4, ["--parallelism.pipeline_parallel_degree=2"]),
    "one process, compiled": (1, COMPILED),
    "FSDP 2, multi-token prediction, document masks": (
        2,
        [MULTI_TOKEN, "--data.packing=best_fit", "--data.mask_documents=true"],
    ),
    "TP 2, multi-token prediction, Muon": (
        2,
        [MULTI_TOKEN, "--optimizer.name=muon", "--parallelism.tensor_parallel_degree=2"],
    ),
}


def state(job: Job) -> dict[str, torch.Tensor]:
    """The weights and persistent buffers in the checkpoint of step 5."""
    tensors = model_tensors(job.model.build())
    load_tensors(job.folder / "checkpoint/step-5", {"model": tensors})
    return {name: tensor.detach() for name, tensor in tensors.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(RUNS, {"FSDP 2"}))
def test_weights_after_five_steps_are_those_of_one_process(
    run_on, name: str, tmp_path: Path, corpus: Path
) -> None:
    world_size, keys = RUNS[name]
    same = [
        *MODEL,
        "--training.steps=5",
        *(key for key in keys if key.startswith(("--optim", "--data", "--model"))),
    ]
    wanted = make_job(tmp_path, corpus, *same, name="alone")
    train(wanted)
    run_on(world_size, train_on_rank, tmp_path, corpus, [*same, *keys], "run", world_size)
    actual = make_job(tmp_path, corpus, *same, name="run")
    for key in ("train/loss", "train/mtp_loss")[: 1 + (MULTI_TOKEN in keys)]:
        losses = [[row[key] for row in metrics_of(job)] for job in (actual, wanted)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    ours, whole = state(actual), state(wanted)
    assert whole["model.layers.1.mlp.gate.e_score_correction_bias"].count_nonzero() > 0
    for parameter, value in whole.items():
        assert (ours[parameter] - value).norm() <= 2e-3 * value.norm(), parameter


def test_a_detailed_report_measures_attention(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, *MODEL, "--training.steps=2", "--metrics.probe_freq=2")
    train(job)
    last = metrics_of(job)[-1]
    assert last["probe/attention_logit_max"] > 0
    assert "probe/dead_units_pct" not in last
