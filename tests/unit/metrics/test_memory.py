"""Out of memory: the message names the step, the phase, and settings that need less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from tests.support.jobs import make_job
from titanlite import cli, evaluate
from titanlite import generate as sampling
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.commit import CheckpointError
from titanlite.metrics import memory
from titanlite.metrics.memory import OutOfMemory, is_out_of_memory, phase
from titanlite.parallel import clip
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.train import train

PUBLIC_KEYS = Path(__file__).parents[2] / "golden/public_keys.txt"


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


def test_errors_beside_the_allocator_are_known() -> None:
    texts = (
        "NCCL error: unhandled cuda error, Last error:\nCuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
        "InductorError: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "Triton Error [CUDA]: out of memory",
        "CUDA driver error: out of memory",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    )
    assert all(is_out_of_memory(RuntimeError(text)) for text in texts)
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(RuntimeError("CUDA error: unspecified launch failure\nout of memory"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))


def test_an_error_keeps_its_own_exit_code() -> None:
    text = "step 3 could not be saved: CUDA error: out of memory"
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(CheckpointError(text))


def test_a_run_out_of_memory_says_so(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ShardedModel.model_inputs
    calls: list[int] = []

    def small(*args: Any) -> Any:
        calls.append(0)
        if len(calls) == 6:  # of two per step: in the third
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*args)

    monkeypatch.setattr(ShardedModel, "model_inputs", small)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        OutOfMemory, match=r"out of memory in step 3, forward. Settings that need less memory:\n  training"
    ) as e:
        train(make_job(tmp_path, corpus))
    assert isinstance(e.value.__cause__, torch.OutOfMemoryError)
    assert str(e.value).endswith("\nCUDA out of memory")
    assert cli.exit_code(e.value) == 5


def test_a_model_that_does_not_fit_says_what_it_takes(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ShardedModel, "materialize", too_large)
    weights = "before the first step: weights take 0.0 GiB per rank, gradients"
    with pytest.raises(OutOfMemory, match=rf"{weights} as much"):
        train(make_job(tmp_path, corpus))
    with pytest.raises(
        OutOfMemory, match=rf"{weights} and the average of the weights \(ema.enable\) as much"
    ):
        train(make_job(tmp_path, corpus, "--ema.enable"))


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    "error", [RuntimeError(f"{ALLOCATOR}\nframe #0"), MemoryError(), OSError(12, "fork")]
)
def test_a_machine_out_of_memory_is_one_line(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def too_large(*args: Any) -> None:
        raise error

    monkeypatch.setattr(ShardedModel, "materialize", too_large)
    with pytest.raises(OutOfMemory) as e:
        train(make_job(tmp_path, corpus))
    start = "out of this machine's memory before the first step: weights take 0.0 GiB per rank, gradients"
    assert re.fullmatch(f"{start} as much: .+; `titanlite plan CONFIG` says .+", str(e.value))
    assert cli.exit_code(e.value) == cli.exit_code(error) == 5  # also outside of a run


def test_every_key_that_is_named_exists() -> None:
    keys = set(re.findall(r"\b[a-z][a-z_0-9]*\.[a-z_0-9]+", memory.REMEDIES))
    assert len(keys) == 10
    assert keys <= {re.sub(r"\[\w+\]", "", line) for line in PUBLIC_KEYS.read_text().split()}
