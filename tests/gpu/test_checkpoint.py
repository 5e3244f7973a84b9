"""Checkpoints of state on GPUs: copies on a stream of their own, pinned buffers, votes over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.checkpoints import start_run, state_of
from tests.support.jobs import make_job, metrics_of, write_toml
from titanlite.checkpoint import commit
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.section import Checkpoint
from titanlite.checkpoint.staging import HostBuffers
from titanlite.checkpoint.state import model_tensors

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
WIDTH = 16384  # 1 GiB of weights: a copy takes long enough to be overtaken


def wide() -> nn.Linear:
    """One layer on the GPU."""
    with torch.device("cuda"):
        return nn.Linear(WIDTH, WIDTH, bias=False)


def test_a_save_is_of_its_moment(tmp_path: Path) -> None:
    net = wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = Checkpoint(keep_latest_k=0)
    run = start_run(tmp_path, config, {})
    state = state_of(net, optimizer, tokens=torch.zeros((), dtype=torch.int64, device="cuda"))
    run.warm_up(state)
    for step in (1, 2, 3):
        state.step = step
        net.weight.data.fill_(step)
        run.save(state)
        run.wait_until_staged()
        net.weight.data.fill_(-1.0)  # the next update, at once
    run.close()
    for step in (1, 2, 3):
        load_tensors(tmp_path / f"checkpoint/step-{step}", {"model": model_tensors(net)})
        assert bool((net.weight == step).all())
    assert all(commit.fault(path) is None for _, path in commit.list_committed(tmp_path / "checkpoint"))


def test_control_without_the_wait_a_copy_is_torn() -> None:
    net, buffers = wide(), HostBuffers()
    tensors = {"model": model_tensors(net)}
    buffers.allocate(tensors)
    net.weight.data.fill_(1.0)
    staged = buffers.copy(tensors)
    net.weight.data.fill_(-1.0)
    buffers.wait()
    assert not bool((staged["model"]["weight"] == 1.0).all())


@pytest.mark.parametrize(
    "ngpu",
    [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
)
def test_stopped_and_resumed_equals_whole(tmp_path: Path, corpus: Path, ngpu: int) -> None:
    env = os.environ | {"NGPU": str(ngpu), "PYTHON": sys.executable}

    def run(name: str, *overrides: str) -> int:
        where = [f"--job.dump_folder={tmp_path / name}", f"--data.cache_dir={corpus / 'cache'}"]
        command = [str(ROOT / "run_train.sh"), str(write_toml(tmp_path, corpus)), *where, *overrides]
        return subprocess.run(command, env=env).returncode

    def digests(name: str) -> dict[str, tuple[int, str]]:
        files = commit.digests(commit.read_manifest(tmp_path / name / "checkpoint/step-8"))
        return {file: digest for file, digest in files.items() if file.endswith((".distcp", ".metadata"))}

    assert run("whole") == 0
    assert run("sync", "--checkpoint.async_mode=disabled") == 0
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/STOP").touch()
    assert run("parts") == 75  # after the first step
    assert not (tmp_path / "parts/STOP").exists()
    assert run("parts") == 0
    assert digests("parts") == digests("whole") == digests("sync")
    whole, parts = (
        metrics_of(make_job(tmp_path, corpus, name=name, world_size=ngpu)) for name in ("whole", "parts")
    )
    for key in ("step", "train/loss", "train/grad_norm", "data/batch_sha"):
        assert [line[key] for line in parts] == [line[key] for line in whole]
