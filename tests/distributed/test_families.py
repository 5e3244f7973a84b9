"""Families other than Llama on every layout. Qwen3: the gradients of the norms of queries and keys, whose
weights all heads share, are summed over tensor-parallel ranks. The family from outside the package in
docs/models.md trains, resumes and is sharded like any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel

from tests.support.gradients import SHAPE, build, gradients, on_rank, uneven_sequences
from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import COMPILED
from tests.support.runs import history, run_in_hops, train_on_rank, weights_sha
from tests.support.tiers import full, sampled
from titanlite.config.component import ConfigError
from titanlite.models import qwen3
from titanlite.models.qwen3 import Qwen3
from titanlite.parallel import tensor_parallel

ROOT = Path(__file__).resolve().parents[2]
QWEN3: dict[str, Any] = {"family": "qwen3", "shape": {"head_dim": 16}}  # 4 heads of 16 over a dim of 32
QWEN2: dict[str, Any] = {"family": "qwen2", "shape": {"head_dim": 16}}
# Of the 16 tokens of a sequence, a token sees 5; the rotary frequencies are scaled from position 4 on.
YARN = {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_max_position": 4}
MISTRAL: dict[str, Any] = {"family": "mistral", "shape": {"sliding_window": 5, **YARN}}
GEMMA3: dict[str, Any] = {
    "family": "gemma3",
    "shape": {"head_dim": 16, "sliding_window": 5, "layer_pattern": "SL", "query_pre_attn_scalar": 24},
}
OLMO3: dict[str, Any] = {
    "family": "olmo3",
    "shape": {"sliding_window": 5, "layer_pattern": "SL", **YARN},
}
GPT: dict[str, Any] = {
    "family": "gpt",
    "shape": {
        "n_layers": 3, "sliding_window": 5, "layer_pattern": "SL", "zero_init": False, "logit_softcap": 2.0,
    },
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    "family": "qwen3_5",
    "shape": {
        "n_layers": 3, "layer_pattern": "DLD", "head_dim": 16, "delta_n_k_heads": 2, "delta_n_v_heads": 4,
        "delta_k_head_dim": 8, "delta_v_head_dim": 8,
    },
}  # fmt: skip
DEFAULT_TIER: dict[str, dict[str, Any]] = {
    "gemma3": {"tp": 2}, "qwen3_5": {"tp": 2}, "gpt": {"tp": 2, "cp": 2},
}  # fmt: skip
QWEN3_5_MOE: dict[str, Any] = {
    "family": "qwen3_5_moe",
    "shape": {
        **QWEN3_5["shape"], "hidden_dim": 0, "n_experts": 4, "n_experts_per_token": 2, "moe_hidden_dim": 16,
        "shared_hidden_dim": 24,
    },
}  # fmt: skip
NORMS = ["q_norm.weight", "k_norm.weight"]
OWN = {
    "qwen2": ["v_proj.bias"], "gemma3": NORMS, "olmo3": NORMS, "qwen3_5": NORMS, "qwen3_5_moe": NORMS,
    "gpt": [],
}  # fmt: skip


def assert_same(
    actual: dict[str, torch.Tensor],
    whole: dict[str, torch.Tensor],
    own: Sequence[str] = ("q_norm.weight", "k_norm.weight"),
    atol: float = 1e-7,
) -> None:
    """`own`: parameters that only this family has."""
    assert actual.keys() == whole.keys()
    assert {f"model.layers.1.self_attn.{name}" for name in own} <= set(whole)
    for name, value in whole.items():
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=atol), name


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"tp": 2}), full(2, {"tp": 2, "tied": False, "compile": "aot_eager"}),
        full(4, {"tp": 2, "cp": 2}),
        full(2, {"tp": 2, "activation_checkpoint": "selective", "ac_option": "norms+attention"}),
        full(4, {"dp_replicate": 2}), full(2, {"cp": 2}), full(4, {"activation_checkpoint": "full"}),
        full(2, {"tp": 2, "activation_checkpoint": "selective"}),
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_on_every_layout(run_on, world_size: int, layout: dict[str, Any]) -> None:
    whole = gradients(1, 0, 1, whole_logits=True, tied=layout.get("tied", True), **QWEN3)
    assert_same(run_on(world_size, on_rank, world_size, 2, {**QWEN3, **layout})[0], whole)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"activation_checkpoint": "full", "compile": "aot_eager"}], ids=str
)
def test_gradient_is_the_same_in_a_pipeline(run_on, layout: dict[str, Any]) -> None:
    layout = {"tied": False, **QWEN3, **layout}
    parts = run_on(4, on_rank, 4, 2, {"pp": 2, **layout})
    whole = gradients(1, 0, 1, tied=False, **QWEN3)
    assert_same({name: value for part in parts for name, value in part.items()}, whole)


@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        *((family, 2, DEFAULT_TIER[family["family"]]) for family in (GEMMA3, QWEN3_5)),
        (GPT, 4, DEFAULT_TIER["gpt"]),
        *(
            full(family, world_size, layout)
            for family in (QWEN2, MISTRAL, GEMMA3, OLMO3, QWEN3_5, GPT)
            for world_size, layout in [
                (2, {"tp": 2}), (2, {"cp": 2}), (4, {"tp": 2, "cp": 2}), (4, {"dp_replicate": 2}),
                (2, {"tp": 2, "tied": False, "compile": "aot_eager"}), (2, {"cp": 2, "compile": "aot_eager"}),
                (4, {"activation_checkpoint": "full"}), (2, {"activation_checkpoint": "selective"}),
            ]
            if layout != DEFAULT_TIER.get(family["family"])
        ),
        *(
            full(family, 2, {"tp": 2, "activation_checkpoint": "selective", "ac_option": option})
            for family in (GEMMA3, OLMO3, QWEN3_5)
            for option in ("norms", "norms+attention", "mlp")
        ),
        *(
            full({**QWEN3_5, "shape": {**QWEN3_5["shape"], "n_mtp_layers": 1}}, world_size, layout)
            for world_size, layout in [(2, {"tp": 2}), (4, {"tp": 2, "cp": 2, "compile": "aot_eager"})]
        ),
        *(
            full(QWEN3_5_MOE, world_size, layout)
            for world_size, layout in [
                (2, {"tp": 2}), (4, {"tp": 2, "cp": 2}), (2, {"ep": 2}), (4, {"tp": 2, "ep": 4}),
                (4, {"ep": 2, "tp": 2, "tied": False, "compile": "aot_eager"}),
                (4, {"activation_checkpoint": "full"}), (2, {"ep": 2, "activation_checkpoint": "selective"}),
            ]
        ),
        # A window that hides no token: the kernel without windows runs.
        full({"family": "mistral", "shape": {"sliding_window": 16}}, 2, {"cp": 2}),
    ],
    ids=lambda value: value.get("family", str(value)) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_gradient_with_biases_or_a_window_is_the_same_on_every_layout(
    run_on, family: dict[str, Any], world_size: int, layout: dict[str, Any]
) -> None:
    whole = gradients(1, 0, 1, tied=layout.get("tied", True), **family)
    actual = run_on(world_size, on_rank, world_size, 2, {**family, **layout})[0]
    assert_same(actual, whole, OWN.get(family["family"], []), atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [QWEN2, MISTRAL, GEMMA3, OLMO3, QWEN3_5], ids=lambda family: family["family"]
)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}, {"compile": "aot_eager"}], ids=str)
def test_gradient_with_biases_or_a_window_is_the_same_in_a_pipeline(
    run_on, family: dict[str, Any], layout: dict[str, Any]
) -> None:
    parts = run_on(4, on_rank, 4, 2, {"pp": 2, "tied": False, **family, **layout})
    whole, actual = gradients(1, 0, 1, tied=False, **family), {}
    for part in parts:
        actual |= part
    assert_same(actual, whole, OWN.get(family["family"], []), atol=1e-6)


@pytest.mark.parametrize("changed", [{"sliding_window": 6}, {"rope_type": "linear"}], ids=str)
def test_control_the_window_and_the_scaling_change_the_gradient(changed: dict[str, Any]) -> None:
    whole = gradients(1, 0, 1, **MISTRAL)
    other = gradients(1, 0, 1, **{**MISTRAL, "shape": {**MISTRAL["shape"], **changed}})
    name = "model.layers.1.self_attn.q_proj.weight"
    assert (whole[name] - other[name]).norm() > 1e-2 * whole[name].norm()


def without_a_plan_on_rank() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3, "TP_PLAN", {})
        with pytest.raises(ConfigError) as e:
            build(2, torch.distributed.get_rank(), tp=2, **QWEN3)
    return str(e.value)


def test_norms_without_an_entry_in_tp_plan_are_refused(run_on) -> None:
    wanted = "tp_plan: no pattern matches 'model.layers.0.self_attn.q_norm'"
    assert run_on(2, without_a_plan_on_rank) == [wanted, wanted]


class OwnHeads(SequenceParallel):
    """The style of norms within attention, without the sum over the ranks' heads."""

    def __init__(self, *, sequence_dim: int, **options: Any):
        super().__init__(sequence_dim=sequence_dim, **options)
        if sequence_dim == tensor_parallel.HEADS:
            self.sequence_sharding = (Replicate(),)


def own_heads_on_rank() -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "SequenceParallel", OwnHeads)
        return gradients(2, torch.distributed.get_rank(), 1, tp=2, **QWEN3)


@pytest.mark.full
def test_control_a_missing_sum_over_heads_is_noticed(run_on) -> None:
    whole, name = gradients(1, 0, 1, **QWEN3), "model.layers.0.self_attn.q_norm.weight"
    actual = run_on(2, own_heads_on_rank)[0]
    assert torch.allclose(actual["loss"], whole["loss"])
    assert not torch.allclose(actual[name], whole[name], rtol=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("family", [QWEN3, QWEN2, GEMMA3], ids=lambda family: family["family"])
def test_float8(run_on, family: dict[str, Any], recipe: str) -> None:
    """Norms and biases are not converted, and gradients are equal with and without FSDP."""
    layout = {"float8": recipe, **family}
    whole = gradients(1, 0, 2, **layout)
    assert not torch.allclose(whole["loss"], gradients(1, 0, 2, **family)["loss"], rtol=1e-7)
    own = ["v_proj.bias"] if family is QWEN2 else ["q_norm.weight"]
    assert_same(run_on(2, on_rank, 2, 1, layout)[0], whole, own)


def names_on_rank(layout: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    model, batch = build(2, torch.distributed.get_rank(), **layout), uneven_sequences()
    model.forward_backward([batch], torch.tensor(batch.num_targets))
    model.logits(batch.inputs[:1, :7])
    assert all(isinstance(p, DTensor) for p in model.net.parameters())
    return [(name, tuple(p.shape)) for name, p in model.net.named_parameters()]


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"tp": 2}, {"compile": "aot_eager"}, {"float8": "tensorwise"}], ids=str)
def test_no_transform_renames_a_parameter(run_on, layout: dict[str, Any]) -> None:
    with torch.device("meta"):
        overrides = {**SHAPE, **QWEN3["shape"], "tie_word_embeddings": True}
        net = Qwen3(flavor="debug", overrides=overrides).build()
    wanted = [(name, tuple(p.shape)) for name, p in net.named_parameters()]
    assert all(names == wanted for names in run_on(2, names_on_rank, {**QWEN3, **layout}))


# ---- whole runs

DELTA = [
    f"--model.overrides.{key}={value}"
    for key, value in {
        "layer_pattern": "DL", "delta_n_k_heads": 2, "delta_n_v_heads": 4, "delta_k_head_dim": 8,
        "delta_v_head_dim": 8,
    }.items()
]  # fmt: skip
FAMILIES = {
    "qwen3": ["--model.name=qwen3", "--model.overrides.tie_word_embeddings=false"],
    "qwen2": ["--model.name=qwen2", "--model.overrides.tie_word_embeddings=false"],
    "mistral": [
        *("--model.name=mistral", "--model.overrides.tie_word_embeddings=false"),
        "--model.overrides.sliding_window=9",
    ],
    "mixed": [
        *("--model.name=qwen3", "--model.overrides.tie_word_embeddings=false"),
        *("--model.overrides.sliding_window=5", "--model.overrides.layer_pattern=LS"),
        *("--model.overrides.window_rope_theta=100.0",),
    ],
    "gpt_oss": [
        *("--model.name=gpt_oss", "--model.overrides.hidden_dim=0", "--model.overrides.sliding_window=9"),
        *("--model.overrides.n_experts=8", "--model.overrides.n_experts_per_token=2"),
        *("--model.overrides.moe_hidden_dim=24", "--model.overrides.rope_original_max_position=16"),
    ],
    "gemma3": [
        *("--model.name=gemma3", "--model.overrides.tie_word_embeddings=false"),
        *("--model.overrides.sliding_window=9", "--model.overrides.layer_pattern=SL"),
    ],
    "olmo3": [
        *("--model.name=olmo3", "--model.overrides.sliding_window=9", "--model.overrides.layer_pattern=SL"),
        *("--model.overrides.rope_type=yarn", "--model.overrides.rope_factor=4.0"),
        "--model.overrides.rope_original_max_position=16",
    ],
    "gpt": [
        *("--model.name=gpt", "--model.overrides.sliding_window=9", "--model.overrides.layer_pattern=SL"),
        "--optimizer.lr=1e-2",
        *("--data.packing=best_fit", "--data.mask_documents=true"),
    ],
    "qwen3_5": [
        *("--model.name=qwen3_5", "--model.overrides.tie_word_embeddings=false", *DELTA),
        *("--data.packing=best_fit", "--data.mask_documents=true"),
    ],
    "qwen3_5_moe": [
        *("--model.name=qwen3_5_moe", "--model.overrides.hidden_dim=0", *DELTA),
        *("--model.overrides.n_experts=8", "--model.overrides.n_experts_per_token=2"),
        *("--model.overrides.moe_hidden_dim=24", "--model.overrides.shared_hidden_dim=24"),
    ],
    "parallel_residual": [
        '--job.imports=["tests.support.parallel_residual"]',
        '--model={name = "parallel_residual", flavor = "tiny"}',
    ],
}
LAYOUTS = {
    "fsdp": COMPILED,
    "tp": ["--parallelism.tensor_parallel_degree=2"],
    "cp": ["--parallelism.context_parallel_degree=2", "--activation_checkpoint.mode=full"],
    "pp": ["--parallelism.pipeline_parallel_degree=2"],
    "cp compiled": ["--parallelism.context_parallel_degree=2", *COMPILED],
}


@pytest.mark.parametrize("family", sampled(FAMILIES, {"parallel_residual"}))
def test_a_run_resumes_to_the_bit(tmp_path: Path, corpus: Path, family: str) -> None:
    """A run of three steps that resumes for five more equals a run of eight steps."""
    overrides = FAMILIES[family]
    whole = run_in_hops(tmp_path, corpus, [8], *overrides, name="whole")
    hops = run_in_hops(tmp_path, corpus, [3, 8], *overrides, name="hops")
    assert history(hops) == history(whole)
    assert weights_sha(hops, 8) == weights_sha(whole, 8)
    losses = [line["train/loss"] for line in metrics_of(whole)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("parallel_residual", "tp"),
        full("parallel_residual", "pp"),
        full("parallel_residual", "fsdp"),
        full("parallel_residual", "cp"),
        *(
            full(family, layout)
            for family in (
                *("qwen3", "qwen2", "mistral", "mixed", "gpt_oss", "gemma3", "olmo3"),
                *("qwen3_5", "qwen3_5_moe"),
            )
            for layout in ("fsdp", "tp", "cp", "pp")
        ),
        *(full("gpt", layout) for layout in ("fsdp", "tp", "cp", "cp compiled")),
        full("mixed", "cp compiled"),
    ],
)
def test_a_run_resumes_on_another_layout(
    run_on, tmp_path: Path, corpus: Path, family: str, layout: str
) -> None:
    """Three steps on one rank and three on two ranks, compared with six steps on one rank."""
    overrides = FAMILIES[family]
    whole = run_in_hops(tmp_path, corpus, [6], *overrides, name="whole")
    run_in_hops(tmp_path, corpus, [3], *overrides, name="run")
    arguments = [*overrides, *LAYOUTS[layout], "--training.steps=6"]
    run_on(2, train_on_rank, tmp_path, corpus, arguments, "run", 2)
    steps = metrics_of(make_job(tmp_path, corpus, *overrides, name="run"))
    assert [step["data/batch_sha"] for step in steps] == [step[3] for step in history(whole)]
    for key in ("train/loss", "train/grad_norm"):
        expected = [step[key] for step in metrics_of(whole)]
        assert [step[key] for step in steps] == pytest.approx(expected, abs=2e-5)
