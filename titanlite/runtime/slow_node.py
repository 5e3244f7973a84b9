"""How the ranks of a node tell its launcher that one of them is slow: a file in their notes folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class SlowNode(NamedTuple):
    """The slowest rank of a node, and how many other nodes have a slower one."""

    rank: int
    own_s: float
    """Seconds per step, without waits for other ranks."""
    median_s: float
    """The median over all ranks."""
    num_slower: int


def note_slow(folder: str | None, rank: int, slow: Mapping[int, float], median_s: float) -> None:
    """Note for the launcher of `rank`, this process, whether it is one of the `slow` ranks, whose seconds per
    step are given. `folder`: the notes folder."""
    if folder is None:
        return
    path, partial = Path(folder) / f"slow-{rank}", Path(folder) / f"slow-{rank}.partial"
    with suppress(OSError):  # a full disk is no reason to end the run
        if rank in slow:
            partial.write_text(json.dumps({"median_s": median_s, "slow": list(slow.items())}))
            os.replace(partial, path)
        else:
            path.unlink(missing_ok=True)


def read_slow_node(folder: Path, ranks: Sequence[int]) -> SlowNode | None:
    """What the `ranks` of this node have noted last; None if none of them is slow. All nodes are taken to
    have this number of ranks."""
    for rank in ranks:
        with suppress(OSError):
            note = json.loads((folder / f"slow-{rank}").read_text())
            node_s: dict[int, float] = {}  # of each node's slowest rank
            for other, own_s in note["slow"]:
                node = other // len(ranks)
                node_s[node] = max(own_s, node_s.get(node, 0.0))
            own_s, slowest = max((own_s, other) for other, own_s in note["slow"] if other in ranks)
            this = ranks[0] // len(ranks)
            slower = [node for node in node_s if (node_s[node], node) > (own_s, this)]
            return SlowNode(slowest, own_s, note["median_s"], len(slower))
    return None
