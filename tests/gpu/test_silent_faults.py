"""Checks for silent faults on CUDA: a GPU with one wrong bit is named with its UUID. Without a fault, the
bits of all GPUs are equal, and checks change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gpu import shards, trained

pytestmark = pytest.mark.gpu
ON = ["--guard.fault_check_freq=2", "--training.mixed_precision_param=bfloat16"]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
BROKEN = """
import torch
from torch.nn import functional as F
from titanlite.parallel.sharded_model import ShardedModel

fingerprint, linear = ShardedModel.fingerprint, F.linear
state = {"checks": 0, "is_broken": False}

def flipping(*args):
    output = linear(*args)
    if state["is_broken"]:
        output = output.clone()
        output.view(-1)[:1].view(torch.int16).bitwise_xor_(1 << 4)
    return output

def computing(*args):
    state["checks"] += 1
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else RANK
    state["is_broken"] = rank == RANK and state["checks"] == CHECK
    digests = fingerprint(*args)
    state["is_broken"] = False
    return digests

F.linear = flipping
ShardedModel.fingerprint = computing
"""


@pytest.mark.parametrize(
    ("ngpu", "check"),
    [(1, 3), pytest.param(2, 2, marks=TWO), pytest.param(4, 2, marks=FOUR)],  # a single GPU computes twice
)
def test_a_gpu_with_a_wrong_bit_is_named(tmp_path: Path, corpus: Path, ngpu: int, check: int) -> None:
    code = BROKEN.replace("RANK", str(ngpu - 1)).replace("CHECK", str(check))
    (tmp_path / "broken.py").write_text(code)
    batch = f"--training.global_batch_size={4 * ngpu}"
    keys = [*ON, batch, "--checkpoint.interval=1", '--job.imports=["broken"]']
    log = trained(tmp_path, corpus, *keys, ngpu=ngpu, code=6)
    assert f"wrong results of rank {ngpu - 1} on " in log
    assert f"GPU {ngpu - 1} ({torch.cuda.get_device_name()}, GPU-" in log
    assert "found after step 4" in log
    assert "goes back to step 2" in log


@pytest.mark.parametrize("ngpu", [1, pytest.param(2, marks=TWO), pytest.param(4, marks=FOUR)])
@pytest.mark.parametrize("compiled", [False, True])
def test_gpus_have_equal_bits_and_a_check_changes_nothing(
    tmp_path: Path, corpus: Path, ngpu: int, compiled: bool
) -> None:
    keys = [f"--training.global_batch_size={4 * ngpu}", *(["--compile.enable"] if compiled else [])]
    for name, own in (("with", ["--guard.fault_check_freq=1"]), ("without", [])):
        log = trained(tmp_path, corpus, *keys, *own, ngpu=ngpu, name=name)
        assert "silent fault" not in log
    assert shards(tmp_path / "with", 8) == shards(tmp_path / "without", 8) != {}
