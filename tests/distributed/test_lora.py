"""Adapters on every layout: gradients equal those of one process, base weights do not change, and runs resume
to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.gradients import gradients, on_rank
from tests.support.jobs import make_job, metrics_of
from tests.support.layouts import COMPILED
from tests.support.runs import assert_same as assert_same_bits
from tests.support.runs import history, run_in_hops, train_on_rank
from tests.support.tiers import full, sampled
from titanlite import cli
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import saved_tensors
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.mesh import local_shard_and_offsets
from titanlite.models.lora import LoRA
from titanlite.parallel import tensor_parallel
from titanlite.run import Run
from titanlite.torch_compat import plain_tensor
from titanlite.train import build, train

# Among the targets are layers with column-wise and row-wise shards.
LORA: dict[str, Any] = {
    "lora": LoRA(enable=True, rank=3, alpha=7.0, targets=["[qv]_proj", "o_proj", "mlp.*"])
}
QWEN2: dict[str, Any] = {"family": "qwen2", "shape": {"head_dim": 16}}


def assert_same(actual: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == whole.keys()
    assert {
        "model.layers.1.self_attn.o_proj.lora_A.weight",
        "model.layers.0.mlp.up_proj.lora_B.weight",
    } <= set(whole)
    assert not {"model.norm.weight", "model.layers.0.self_attn.k_proj.lora_A.weight"} & set(whole)
    for name, value in whole.items():
        assert value.norm() > 0, name
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"tp": 2}), full(2, {}), full(2, {"cp": 2}), full(4, {"dp_replicate": 2}),
        full(4, {"tp": 2, "cp": 2}),
        full(4, {"tp": 2}), full(2, {"tp": 2, "compile": "aot_eager"}), full(2, {"compile": "aot_eager"}),
        full(2, {"activation_checkpoint": "full"}), full(2, {"activation_checkpoint": "selective"}),
        full(2, {"tp": 2, "activation_checkpoint": "selective", "ac_option": "norms+attention"}),
        full(2, {"tp": 2, "activation_checkpoint": "full", "compile": "aot_eager"}),
        full(2, {"reduce": "micro_batch"}), full(2, {"tp": 2, **QWEN2}),
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_on_every_layout(run_on, world_size: int, layout: dict[str, Any]) -> None:
    family = {key: layout[key] for key in ("family", "shape") if key in layout}
    whole = gradients(1, 0, 1, **LORA, **family)
    for actual in run_on(world_size, on_rank, world_size, 2, {**LORA, **layout}):
        assert_same(actual, whole)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {}, {"tp": 2}, {"activation_checkpoint": "full", "compile": "aot_eager"},
        {"schedule": "Interleaved1F1B", "layers": 4}, {"schedule": "InterleavedZeroBubble", "layers": 4},
        {"schedule": "ZBVZeroBubble", "layers": 4},
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_in_a_pipeline(run_on, layout: dict[str, Any]) -> None:
    layout = {"tied": False, **LORA, **layout}
    parts = run_on(4, on_rank, 4, 2, {"pp": 2, **layout})
    whole = gradients(1, 0, 1, tied=False, **LORA, layers=layout.get("layers", 2))
    assert_same({name: value for part in parts for name, value in part.items()}, whole)


def on_rank_without_sums() -> dict[str, torch.Tensor]:
    """The gradient if the tensor-parallel ranks' summands for replicated matrices were not added."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLWISE_ADAPTER", "ROWWISE_ADAPTER"):
            placements = getattr(tensor_parallel, name)
            wrong = placements._replace(a_gradient=placements.a, b_gradient=placements.b)
            patch.setattr(tensor_parallel, name, wrong)
        return on_rank(2, 2, {**LORA, "tp": 2})


@pytest.mark.full
def test_control_gradients_of_replicated_matrices_have_to_be_added(run_on) -> None:
    whole, actual = gradients(1, 0, 1, **LORA), run_on(2, on_rank_without_sums)[0]
    wrong = {name for name in whole if not torch.allclose(actual[name], whole[name], rtol=1e-3, atol=1e-6)}
    replicated = {
        name
        for name in whole
        if name.endswith("o_proj.lora_B.weight")
        or name.endswith(("q_proj.lora_A.weight", "up_proj.lora_A.weight"))
    }
    assert replicated <= wrong
    assert not any(name.endswith(("q_proj.lora_B.weight", "o_proj.lora_A.weight")) for name in wrong)


# ---- whole runs

UNTIED = "--model.overrides.tie_word_embeddings=false"
LAYOUTS = {
    "fsdp": COMPILED,
    "hsdp": ["--parallelism.data_parallel_replicate_degree=2"],
    "tp": ["--parallelism.tensor_parallel_degree=2"],
    "cp": ["--parallelism.context_parallel_degree=2", "--activation_checkpoint.mode=full"],
    "pp": ["--parallelism.pipeline_parallel_degree=2"],
    "offload": ["--training.enable_cpu_offload"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A small model as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("base")
    job = make_job(folder, corpus, UNTIED, "--training.steps=2")
    train(job)
    assert cli.run(["export", str(job.folder), str(folder / "hf"), "--dtype", "bfloat16"]) == 0
    return folder / "hf"


def keys_of(base: Path) -> list[str]:
    keys = ["--lora.enable", "--lora.rank=4", "--optimizer.lr=0.02", "--training.clip=tensor", "--ema.enable"]
    return [*keys, UNTIED, f"--checkpoint.initial_load_path={base}"]


def adapters_of(job: Job, step: int) -> dict[str, torch.Tensor]:
    """The adapters in a checkpoint, which holds no other weights."""
    net = job.build_on_meta().to_empty(device="cpu")
    tensors = saved_tensors(net)
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": tensors})
    return tensors


@pytest.mark.full
def test_a_run_resumes_to_the_bit(tmp_path: Path, corpus: Path, base: Path) -> None:
    whole = run_in_hops(tmp_path, corpus, [8], *keys_of(base), name="whole")
    hops = run_in_hops(tmp_path, corpus, [3, 8], *keys_of(base), name="hops")
    assert_same_bits(hops, whole)
    losses = [line["train/loss"] for line in metrics_of(whole)]
    assert losses[-1] < losses[0] - 0.08


def trained(*args: Any) -> Run:
    """The run that `train_on_rank` has trained with these arguments."""
    runs: list[Run] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titanlite.train.build", lambda *args: runs.append(build(*args)) or runs[-1])
        train_on_rank(*args)
    return runs[0]


def changed(run: Run, base: Path) -> dict[str, bool]:
    """Whether this rank's shard of a weight differs from the base model's file in any bit, for each weight of
    the base model that this rank has."""
    weights, differs = load_file(base / "model.safetensors"), dict[str, bool]()
    for name, p in run.model.net.named_parameters():
        if name in weights:
            local, offsets = local_shard_and_offsets(plain_tensor(p.detach()))
            shard = weights[name].float()[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape))]
            differs[name] = not torch.equal(local.cpu(), shard)
    return differs


def changed_on_rank(folder: Path, corpus: Path, overrides: list[str], base: Path) -> dict[str, bool]:
    return changed(trained(folder, corpus, overrides, "run", 2), base)


def test_base_weights_do_not_change(tmp_path: Path, corpus: Path, base: Path) -> None:
    keys = [*keys_of(base), "--optimizer.name=muon", "--training.steps=4"]
    control = trained(tmp_path, corpus, [*keys, "--lora.enable=false"], "control", 1)
    assert all(changed(control, base).values())
    run = trained(tmp_path, corpus, keys, "run", 1)
    differs = changed(run, base)
    parameters, stored = dict(run.model.net.named_parameters()), load_file(base / "model.safetensors")
    assert differs == dict.fromkeys(stored, False)
    adapters = parameters.keys() - stored.keys()
    assert len(adapters) == 28
    assert all(parameters[name].norm() > 0 for name in adapters), "B starts as zeros"
    optimized = {p for group in run.state.optimizer.param_groups for p in group["params"]}
    assert optimized == {parameters[name] for name in adapters}
    assert all(parameters[name].grad is None for name in stored)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, set()))
def test_a_run_resumes_on_another_layout(
    run_on, tmp_path: Path, corpus: Path, base: Path, layout: str
) -> None:
    """Three steps on one rank and three on two ranks, compared with six steps on one rank. The base model's
    weights stay the same to the bit."""
    keys = [*keys_of(base), "--training.local_batch_size=2"]
    whole = run_in_hops(tmp_path, corpus, [6], *keys, name="whole")
    job = run_in_hops(tmp_path, corpus, [3], *keys, name="run")
    arguments = [*keys, *LAYOUTS[layout], "--training.steps=6"]
    ranks = run_on(2, changed_on_rank, tmp_path, corpus, arguments, base)
    assert ranks[0] | ranks[1] == dict.fromkeys(load_file(base / "model.safetensors"), False)
    assert not any(differs for rank in ranks for differs in rank.values())
    steps = metrics_of(job)
    assert [step["data/batch_sha"] for step in steps] == [step[3] for step in history(whole)]
    for key in ("train/loss", "train/grad_norm"):
        assert [step[key] for step in steps] == pytest.approx([s[key] for s in metrics_of(whole)], abs=2e-5)
    ours, theirs = adapters_of(job, 6), adapters_of(whole, 6)
    assert len(ours) == 28
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=2e-4), name
    before = adapters_of(job, 3)
    assert not any(torch.allclose(before[name], value, atol=2e-4) for name, value in theirs.items())


def test_a_changed_base_model_is_refused(tmp_path: Path, corpus: Path, base: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    tensors = load_file(base / "model.safetensors")
    save_file(tensors, moved / "model.safetensors")
    run_in_hops(tmp_path, corpus, [2], *keys_of(base), name="run")
    job = run_in_hops(tmp_path, corpus, [3], *keys_of(moved), name="run")  # elsewhere, but the same values
    tensors["model.norm.weight"][5] *= 1.01
    save_file(tensors, moved / "model.safetensors")
    with pytest.raises(ConfigError, match="are not those of the base model") as e:
        run_in_hops(tmp_path, corpus, [4], *keys_of(moved), name="run")
    assert e.value.key == "checkpoint.initial_load_path"
    assert "\n" not in str(e.value)
    assert len(metrics_of(job)) == 3
    with pytest.raises(ConfigError, match=r"lora\.rank was 4, is 5"):
        run_in_hops(tmp_path, corpus, [4], *keys_of(base), "--lora.rank=5", name="run")
    with pytest.raises(ConfigError, match=r'lora\.targets was \["down_proj", .*\], is \["q_proj"\]'):
        run_in_hops(tmp_path, corpus, [4], *keys_of(base), '--lora.targets=["q_proj"]', name="run")
    same_layers = '--lora.targets=["self_attn.*", "*_proj"]'
    job = run_in_hops(tmp_path, corpus, [4], *keys_of(base), same_layers, name="run")
    assert len(metrics_of(job)) == 4
