"""SlowRanks: names a rank that needs more time per step than the others.

Ranks wait for each other in every collective, so all of them have the same step time. A slow rank is the one
that waits least: its own time, the step without its waits for collectives, stands out."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from titanlite.log import logger
from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.ranks import Ranks

# A rank stands out if its own time is above the median by more than both.
SLOWER = 0.2  # of the median
SLOWER_S = 0.02
IN_A_ROW = 2  # reports in which a rank stands out before it is named, or does not before it has recovered
KINDS = {
    "data": "most of the difference is its wait for data",
    "host": "its host issues the work more slowly",
    "device": "its device computes more slowly",
}


class RankTimes(NamedTuple):
    """Seconds per step of one rank."""

    own_s: float
    data_s: float
    host_bound: float
    """1.0 if its device does not lag behind its host, else 0.0."""


class SlowRanks(OpenMetric):
    """The ranks that were named as slow. All ranks decide the same, and rank 0 logs it.

    `on_change`: called when a rank has become slow or has recovered, with the own seconds per step of the
    ranks that are slow, and the median over all ranks.

    Metrics:
        time/slowest_rank, time/slowest_rank_pct (%): with several ranks: the rank that needed most time per
            step without waits for other ranks, and by how much it is above the median ([slow
            ranks](troubleshooting.md#a-rank-is-slow))
    """

    def __init__(self, ranks: Ranks, on_change: Callable[[Mapping[int, float], float], object] | None = None):
        self._ranks, self._on_change = ranks, on_change
        self._is_first = True  # the first report has compilation and other work that is done once
        self._in_a_row = Counter[int]()  # reports in which a rank's state differs from the logged one
        self._named = set[int]()

    def measure(self, step: StepResult) -> dict[str, float]:
        """Compare the steps since the last report, log which rank has become slow or has recovered, and
        return the metrics on the slowest rank. Waits for the device. Collective."""
        times = self._ranks.clock.times()
        if times is None or self._ranks.size == 1:
            return {}
        own = RankTimes(times.own_s, times.phases["data"], float(times.host_bound))
        ranks = [RankTimes(*row) for row in self._ranks.gather_floats(own)]
        if self._is_first:
            self._is_first = False
        else:
            self._judge(ranks)
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].own_s)
        middle = max(_median(ranks).own_s, 1e-9)
        return {
            "time/slowest_rank": slowest,
            "time/slowest_rank_pct": 100 * (ranks[slowest].own_s / middle - 1),
        }

    def _judge(self, ranks: Sequence[RankTimes]) -> None:
        middle = _median(ranks)
        changed = []
        for rank, times in enumerate(ranks):
            excess_s = times.own_s - middle.own_s
            stands_out = excess_s > max(SLOWER * middle.own_s, SLOWER_S)
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if stands_out != (rank in self._named) else 0
            if self._in_a_row[rank] == IN_A_ROW:
                self._in_a_row[rank] = 0
                changed.append(rank)
        hosts = self._ranks.all_gather(socket.gethostname()) if changed else []
        for rank in changed:
            self._named ^= {rank}
            if self._ranks.rank == 0:
                self._log(f"rank {rank} on {hosts[rank]}", ranks[rank], middle, rank in self._named)
        if changed and self._on_change is not None:
            self._on_change({rank: ranks[rank].own_s for rank in self._named}, middle.own_s)

    def _log(self, rank: str, times: RankTimes, middle: RankTimes, is_slow: bool) -> None:
        if not is_slow:
            logger.warning(f"{rank} is as fast as the other ranks again")
            return
        excess_s = times.own_s - middle.own_s
        kind = "host" if times.host_bound else "device"
        if times.data_s - middle.data_s > excess_s / 2:
            kind = "data"
        logger.warning(
            f"{rank} is slow: without waiting for other ranks, its steps take "
            f"{times.own_s:.3f} s, the median over ranks is {middle.own_s:.3f} s "
            f"(+{100 * excess_s / max(middle.own_s, 1e-9):.0f}%); {KINDS[kind]}"
        )


def _median(ranks: Sequence[RankTimes]) -> RankTimes:
    """The median of each time. Of an even number the lower one, so that one of two ranks can stand out."""
    return RankTimes(*(median_low(column) for column in zip(*ranks)))
