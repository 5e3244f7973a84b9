"""Float8 with FSDP2 and tensor parallel: gathering in 8 bits changes no number, runs resume bit-identically,
and a resumed run may switch float8 on or off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchao.float8 import float8_ops
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from tests.support.gradients import build, gradients, uneven_sequences
from tests.support.jobs import make_job
from tests.support.runs import history, run_in_hops, weights_sha
from titanlite.parallel import tensor_parallel
from titanlite.train import train

FLOAT8 = ("--float8.enable", "--float8.emulate")


def gradients_on_rank(layout: dict[str, Any], scales: bool) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    model = build(2, rank, **layout)
    if scales:
        model.after_step(torch.tensor(True))
    if "float8" in layout:  # otherwise the equality below would compare a computation with itself
        shards = [p._local_tensor for name, p in model.net.named_parameters() if "_proj" in name]
        gathers = [isinstance(shard, WeightWithDynamicFloat8CastTensor) for shard in shards]
        assert set(gathers) == {layout.get("gather", True)}
        assert not scales or all(shard._precomputed_scale is not None for shard in shards)
    batch = uneven_sequences()
    model.forward_backward([batch], torch.tensor(batch.num_targets))
    grads = {name: p.grad for name, p in model.net.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def all_gradients_on_rank() -> list[dict[str, torch.Tensor]]:
    """Without float8; gathering in full precision; gathering in 8 bits, without and with scales."""
    layout = {"float8": "tensorwise"}
    cases = [({}, False), ({**layout, "gather": False}, False), (layout, False), (layout, True)]
    return [gradients_on_rank(*case) for case in cases]


@pytest.mark.full
def test_gathering_in_8_bits_changes_no_number(run_on) -> None:
    plain, reference, *others = run_on(2, all_gradients_on_rank)[0]
    assert any(not torch.equal(reference[name], plain[name]) for name in plain), "float8 is not in use"
    for actual in others:
        assert all(torch.equal(actual[name], reference[name]) for name in reference)


def send_bytes(sent: list[torch.dtype]) -> None:
    """Let tensor parallel send float8 over gloo, as bytes. The dtypes that are gathered go into `sent`."""

    def gather(operator: Any, args: Any, kwargs: Any) -> Float8TrainingTensor:
        sent.append(args[0]._data.dtype)
        gathered = operator(args[0]._data.contiguous().view(torch.uint8), *args[1:], **(kwargs or {}))
        return with_data(args[0], gathered.view(args[0]._data.dtype))

    def wait(operator: Any, args: Any, kwargs: Any) -> Float8TrainingTensor:
        return with_data(args[0], operator(args[0]._data, **(kwargs or {})))

    def with_data(like: Float8TrainingTensor, data: torch.Tensor) -> Float8TrainingTensor:
        names = ("_scale", "_orig_dtype", "_linear_mm_config", "_gemm_input_role")
        return Float8TrainingTensor(data, *(getattr(like, name) for name in names))

    tensor_parallel.can_send_float8 = lambda mesh: True  # type: ignore[assignment]
    operators = torch.ops._c10d_functional
    float8_ops.FLOAT8_OPS_TABLE[operators.all_gather_into_tensor.default] = gather
    float8_ops.FLOAT8_OPS_TABLE[operators.wait_tensor.default] = wait


def tensor_parallel_gradients_on_rank(sends: bool) -> tuple[dict[str, torch.Tensor], set[torch.dtype]]:
    sent = list[torch.dtype]()
    if sends:
        send_bytes(sent)
    layout = {"float8": "tensorwise", "tp": 2, "tied": False, "shape": {"n_kv_heads": 4}}
    return gradients(2, torch.distributed.get_rank(), 1, **layout), set(sent)


@pytest.mark.full
def test_tensor_parallel_that_sends_8_bits_changes_no_number(run_on) -> None:
    (reference, none), (actual, sent) = (
        run_on(2, tensor_parallel_gradients_on_rank, sends)[0] for sends in (False, True)
    )
    assert none == set()
    assert sent == {torch.float8_e4m3fn, torch.float8_e5m2}, "inputs and gradients are sent in float8"
    assert all(torch.equal(actual[name], reference[name]) for name in reference)


def train_on_ranks(folder: str, corpus: str, hops: list[tuple[int, tuple[str, ...]]], name: str) -> None:
    for steps, overrides in hops:
        train(make_job(folder, corpus, f"--training.steps={steps}", *overrides, name=name))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_two_hops_equal_one_run(run_on, tmp_path: Path, corpus: Path, mode: str) -> None:
    overrides = (*FLOAT8, f"--checkpoint.async_mode={mode}")
    jobs = {}
    for name, hops in {"whole": [5], "hops": [2, 5]}.items():
        run_on(2, train_on_ranks, tmp_path, corpus, [(steps, overrides) for steps in hops], name)
        jobs[name] = make_job(tmp_path, corpus, "--training.steps=5", *overrides, name=name)
    assert history(jobs["hops"]) == history(jobs["whole"])
    assert weights_sha(jobs["hops"], 5) == weights_sha(jobs["whole"], 5)


@pytest.mark.full
def test_float8_may_be_switched_on_and_off(run_on, tmp_path: Path, corpus: Path) -> None:
    """Checkpoints are the same with and without float8: a run resumes with float8, then without it."""
    run_on(2, train_on_ranks, tmp_path, corpus, [(3, ()), (6, FLOAT8)], "run")
    job = run_in_hops(tmp_path, corpus, [8], name="run")
    without = run_in_hops(tmp_path, corpus, [8], name="without")
    assert [row[3] for row in history(job)] == [row[3] for row in history(without)], "other sequences"
    losses = [(a[1], b[1]) for a, b in zip(history(job), history(without))]
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in losses[:3])
    assert all(a != b for a, b in losses[3:6]), "float8 is not in use"
    assert all(a == pytest.approx(b, abs=0.05) for a, b in losses)
