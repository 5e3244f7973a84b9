"""Ranks on a GPU that are forked from the launcher's fork server, which must not have used CUDA."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.launcher import Node

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_killed_rank_is_forked_again_and_trains_on_the_gpu(
    tmp_path: Path, corpus: Path, compiled: str
) -> None:
    options = ("--checkpoint.async_mode=disabled", f"--compile.enable={compiled}")
    node = Node(tmp_path, corpus, options, {"MAX_RESTARTS": "1", "KILL": "0 0 7"})
    try:
        assert node.end() == 0, node.log
        node.until(lambda: not node.processes(), timeout_s=30)  # a dead rank's compilers end by themselves
    finally:
        node.close()
    events = map(json.loads, (node.job.folder / "events.jsonl").read_text().splitlines())
    assert [event["step"] for event in events if event["event"] == "recovered"] == [5]
    assert "NVIDIA" in json.loads((node.job.folder / "env.json").read_text())["device"]
    assert "new programs" not in node.log
