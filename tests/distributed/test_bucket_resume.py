"""Two ranks of a node that resume from a bucket read each byte of the checkpoint once between them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import ranks
from tests.support.checkpoints import open_run, sharded_toy
from tests.support.counted_bytes import CountedBytes
from titanlite import bucket_objects
from titanlite.checkpoint import commit, node_copies
from titanlite.storage import parse_path

pytestmark = pytest.mark.full
WIDTH = 600  # 4.3 MB of weights and optimizer state


def save(url: str) -> None:
    folder: Any = parse_path(url)
    size = dist.get_world_size() if dist.is_initialized() else 1
    run, toy = open_run(folder), sharded_toy(size, WIDTH)
    toy.step()
    run.save(toy.state)
    run.close()


def resume(url: str, temporary: str, spare: int) -> int:
    """The bytes that this rank reads."""
    tempfile.tempdir, node_copies.SPARE_BYTES = temporary, spare
    folder: Any = parse_path(url)
    client = CountedBytes(bucket_objects.client_of(folder))
    bucket_objects.clients.update(dict.fromkeys(bucket_objects.clients, client))
    run, toy = open_run(folder), sharded_toy(dist.get_world_size(), WIDTH, seed=1)
    run.load(toy.state)
    run.close()
    return client.count


@pytest.mark.parametrize("writers", [1, 2])
def test_two_ranks_read_each_byte_once(writers: int, bucket: str, tmp_path: Path) -> None:
    url = f"s3://{bucket}/run"
    ranks.run(writers, save, url)
    size = commit.total_size(commit.read_manifest(parse_path(url) / "checkpoint/step-1"))
    read = sum(ranks.run(2, resume, url, str(tmp_path), 0))
    assert size < read <= 1.05 * size
    assert not list(tmp_path.iterdir())
    assert sum(ranks.run(2, resume, url, str(tmp_path), 1 << 60)) > 1.9 * size  # without room for copies
