"""Out of memory: the message names the step, the phase, what the memory held, and three settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.support.jobs import make_job
from titanlite import evaluate
from titanlite import generate as sampling
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.metrics import memory
from titanlite.metrics.memory import GIB, MemorySettings, OutOfMemory, Usage, phase, remedies, usage
from titanlite.parallel import clip
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.train import train

SETTINGS = MemorySettings(
    local_batch_size=8, micro_batches=1, shards=1, recompute="none", chunked_loss=True, float8_possible=True,
    reduces_each=False, pipeline=False, logits=1 * GIB,
)  # fmt: skip
USED = Usage(parameters=6 * GIB, gradients=6 * GIB, optimizer=12 * GIB, logits=1 * GIB, activations=50 * GIB)


def settings_of(**changes: Any) -> list[str]:
    return [remedy.setting.split(",")[0] for remedy in remedies(USED, replace(SETTINGS, **changes))]


def test_half_a_batch_divides_it() -> None:
    assert "training.local_batch_size = 3" in settings_of(local_batch_size=9)
    assert "training.local_batch_size = 1" in settings_of(local_batch_size=7)


def test_what_helps_depends_on_what_is_set() -> None:
    full, half = 'activation_checkpoint.mode = "full"', "training.local_batch_size = 4"
    float8, gpus = "float8.enable = true", "twice the GPUs"
    assert settings_of() == [full, half, "half of training.seq_len"]
    seq_len, chunk = "half of training.seq_len", "half of loss.chunk_tokens"
    assert settings_of(recompute="full") == [half, seq_len, float8]
    assert settings_of(recompute="full", local_batch_size=1, float8_possible=False) == [seq_len, gpus, chunk]
    reduce = 'parallelism.fsdp_reduce = "micro_batch"'
    used = USED._replace(gradients=64 * 6 * GIB)
    several = replace(SETTINGS, micro_batches=4, shards=64)
    assert remedies(used, several)[0] == (reduce, 63 * 6 * GIB)
    assert all(r.setting != reduce for r in remedies(used, replace(several, reduces_each=True)))


def test_the_logits_count_when_they_are_whole() -> None:
    used = USED._replace(logits=100 * GIB)
    found = remedies(used, replace(SETTINGS, chunked_loss=False))
    assert found[0].setting == 'loss.name = "chunked_cross_entropy"'
    assert found[0].saves == 90 * GIB
    assert len(found) == 3


def test_usage_adds_up_to_the_peak() -> None:
    net, small = nn.Linear(100, 10, bias=False), replace(SETTINGS, logits=50)
    optimizer = torch.optim.AdamW(net.parameters())
    assert usage(optimizer, small, 20_000) == (4000, 4000, 0, 50, 11_950)
    net(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert usage(optimizer, small, 20_000) == (4000, 4000, 8004, 50, 3946)
    assert usage(optimizer, replace(small, logits=0), 0).activations == 0
    whole = replace(small, micro_batches=2, shards=3)  # a whole model's gradients, not only this rank's
    assert usage(optimizer, whole, 40_000) == (4000, 12_000, 8004, 50, 15_946)


def test_the_phase_is_the_innermost_function_that_has_one() -> None:
    def forward_backward() -> None:
        backward()

    def backward() -> None:
        helper()

    def helper() -> None:
        raise ValueError

    for act, wanted in ((forward_backward, "backward"), (helper, "outside a step")):
        with pytest.raises(ValueError) as e:
            act()
        assert phase(e.tb) == wanted


def test_the_phases_are_functions_that_there_are() -> None:
    there = (ShardedModel, torch.Tensor, clip, torch.optim.Optimizer, evaluate, sampling, Checkpointer)
    there += (PipelineStage,)
    assert all(any(hasattr(place, name) for place in there) for name in memory.PHASES)


def test_a_run_out_of_memory_says_so(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ShardedModel.model_inputs
    calls: list[int] = []

    def small(self: ShardedModel, batch: Any) -> Any:
        calls.append(0)
        if len(calls) == 6:  # of two per step: in the third
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, batch)

    monkeypatch.setattr(ShardedModel, "model_inputs", small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        OutOfMemory, match=r"out of memory in step 3, forward: .* optimizer .*\n  .*\n  "
    ) as e:
        train(make_job(tmp_path, corpus))
    assert isinstance(e.value.__cause__, torch.OutOfMemoryError)


def test_a_model_that_does_not_fit_says_what_it_takes(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ShardedModel, "materialize", too_large)
    with pytest.raises(OutOfMemory, match=r"before the first step: of .*weights take 0.0, .*more GPUs"):
        train(make_job(tmp_path, corpus))
