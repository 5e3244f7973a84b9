"""One node opens no port to the network over NCCL, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.launcher import Node
from tests.support.ports import is_loopback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_gpus_listen_on_the_loopback_interface_only(tmp_path: Path, corpus: Path) -> None:
    node = Node(tmp_path, corpus, (), {"NGPU": "2", "MAX_RESTARTS": "1", "KILL": "1 0 7"})
    try:
        assert node.end() == 0, node.log
    finally:
        node.close()
    assert node.starts == ["0 0", "0 1", "1 0", "1 1"]
    assert node.listened, "the ranks meet somewhere"
    assert all(map(is_loopback, node.listened)), node.listened
