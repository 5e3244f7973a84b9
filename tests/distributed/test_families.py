"""Families besides Llama on every layout. Qwen3: the norms of queries and keys, whose weights all heads
share, have the sum of what the heads of all tensor-parallel ranks want. One from outside the package, which
docs/models.md shows: it trains, resumes and is divided like any other."""

from __future__ import annotations

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
from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.models import qwen3
from titanlite.models.qwen3 import Qwen3
from titanlite.parallel import tensor_parallel as tensor

ROOT = Path(__file__).resolve().parents[2]
QWEN3: dict[str, Any] = {"family": "qwen3", "shape": {"head_dim": 16}}  # 4 heads of 16 over a dim of 32


def assert_same(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert found.keys() == whole.keys()
    assert {"model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"} <= set(whole)
    for name, value in whole.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"tensor": 2}), full(2, {"tensor": 2, "tied": False, "compile": "aot_eager"}),
        full(4, {"tensor": 2, "context": 2}),
        (2, {"tensor": 2, "recompute": "selective", "what": "norms+attention"}),
        full(4, {"replicate": 2}), full(2, {"context": 2}), full(4, {"recompute": "full"}),
        full(2, {"tensor": 2, "recompute": "selective"}),
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_on_every_layout(run_on, world_size: int, layout: dict[str, Any]) -> None:
    whole = gradients(1, 0, 1, whole_logits=True, tied=layout.get("tied", True), **QWEN3)
    assert_same(run_on(world_size, on_rank, world_size, 2, {**QWEN3, **layout})[0], whole)


@pytest.mark.parametrize(
    "layout", [full({}), {"tensor": 2}, full({"recompute": "full", "compile": "aot_eager"})], ids=str
)
def test_gradient_is_the_same_in_a_pipeline(run_on, layout: dict[str, Any]) -> None:
    layout = {"tied": False, **QWEN3, **layout}
    parts = run_on(4, on_rank, 4, 2, {"pipeline": 2, **layout})
    whole = gradients(1, 0, 1, tied=False, **QWEN3)
    assert_same({name: value for part in parts for name, value in part.items()}, whole)


def without_a_plan_on_rank() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3, "TP_PLAN", {})
        with pytest.raises(ConfigError) as e:
            build(2, torch.distributed.get_rank(), tensor=2, **QWEN3)
    return str(e.value)


def test_norms_that_are_not_in_the_plan_are_refused(run_on) -> None:
    wanted = "tp_plan: no pattern matches 'model.layers.0.self_attn.q_norm'"
    assert run_on(2, without_a_plan_on_rank) == [wanted, wanted]


class OwnHeads(SequenceParallel):
    """Norms of heads, as if all heads were on each rank."""

    def __init__(self, *, sequence_dim: int, **options: Any):
        super().__init__(sequence_dim=sequence_dim, **options)
        if sequence_dim == tensor.HEADS:
            self.sequence_sharding = (Replicate(),)


def own_heads_on_rank() -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "SequenceParallel", OwnHeads)
        return gradients(2, torch.distributed.get_rank(), 1, tensor=2, **QWEN3)


def test_control_a_missing_sum_over_heads_is_noticed(run_on) -> None:
    whole, name = gradients(1, 0, 1, **QWEN3), "model.layers.0.self_attn.q_norm.weight"
    found = run_on(2, own_heads_on_rank)[0]
    assert torch.allclose(found["loss"], whole["loss"])
    assert not torch.allclose(found[name], whole[name], rtol=1e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", full("rowwise")])
def test_float8(run_on, recipe: str) -> None:
    """The norms are no linear layers; sharded and whole are the same."""
    layout = {"float8": recipe, **QWEN3}
    whole = gradients(1, 0, 2, **layout)
    assert not torch.allclose(whole["loss"], gradients(1, 0, 2, **QWEN3)["loss"], rtol=1e-7)
    assert_same(run_on(2, on_rank, 2, 1, layout)[0], whole)


def names_on_rank(layout: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    model, batch = build(2, torch.distributed.get_rank(), **layout), uneven_sequences()
    model.forward_backward([batch], torch.tensor(batch.num_targets))
    model.logits(batch.inputs[:1, :7])
    assert all(isinstance(p, DTensor) for p in model.net.parameters())
    return [(name, tuple(p.shape)) for name, p in model.net.named_parameters()]


@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, full({"compile": "aot_eager"}), full({"float8": "tensorwise"})], ids=str
)
def test_no_transform_renames_a_parameter(run_on, layout: dict[str, Any]) -> None:
    with torch.device("meta"):
        overrides = {**SHAPE, **QWEN3["shape"], "tie_word_embeddings": True}
        net = Qwen3(flavor="debug", overrides=overrides).build()
    wanted = [(name, tuple(p.shape)) for name, p in net.named_parameters()]
    assert all(names == wanted for names in run_on(2, names_on_rank, {**QWEN3, **layout}))


# ---- runs, of a family from outside too

FAMILIES = {
    "qwen3": ["--model.name=qwen3", "--model.overrides.tie_word_embeddings=false"],
    "parallel_residual": [
        '--job.imports=["tests.support.parallel_residual"]',
        '--model={name = "parallel_residual", flavor = "tiny"}',
    ],
}
LAYOUTS = {
    "fsdp": COMPILED,
    "tensor": ["--parallelism.tensor_parallel_degree=2"],
    "context": ["--parallelism.context_parallel_degree=2", "--activation_checkpoint.mode=full"],
    "pipeline": ["--parallelism.pipeline_parallel_degree=2"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_resumes_to_the_bit(tmp_path: Path, corpus: Path, family: str) -> None:
    """Three steps and five on one rank, against eight."""
    overrides = FAMILIES[family]
    whole = run_in_hops(tmp_path, corpus, [8], *overrides, name="whole")
    hops = run_in_hops(tmp_path, corpus, [3, 8], *overrides, name="hops")
    assert history(hops) == history(whole)
    assert weights_sha(hops, 8) == weights_sha(whole, 8)
    losses = [row["train/loss"] for row in metrics_of(whole)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("parallel_residual", "tensor"),
        full("parallel_residual", "pipeline"),
        full("parallel_residual", "fsdp"),
        full("parallel_residual", "context"),
        *(full("qwen3", layout) for layout in LAYOUTS),
    ],
)
def test_a_run_goes_on_under_a_layout(run_on, tmp_path: Path, corpus: Path, family: str, layout: str) -> None:
    """Three steps on one rank and three on two, against six on one."""
    overrides = FAMILIES[family]
    whole = run_in_hops(tmp_path, corpus, [6], *overrides, name="whole")
    run_in_hops(tmp_path, corpus, [3], *overrides, name="run")
    arguments = [*overrides, *LAYOUTS[layout], "--training.steps=6"]
    run_on(2, train_on_rank, tmp_path, corpus, arguments, "run", 2)
    rows = metrics_of(make_job(tmp_path, corpus, *overrides, name="run"))
    assert [row["data/batch_sha"] for row in rows] == [row[3] for row in history(whole)]
    for key in ("train/loss", "train/grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in metrics_of(whole)], abs=2e-5)


def test_the_documentation_shows_the_family_that_is_tested() -> None:
    shown = (ROOT / "docs" / "models.md").read_text()
    code = (ROOT / "tests" / "support" / "parallel_residual.py").read_text()
    assert f"```python\n{code}```" in shown
