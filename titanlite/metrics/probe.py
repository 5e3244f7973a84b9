"""The metrics of a probe: an additional forward that looks inside the blocks (parallel/probe.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.metrics.sinks.base import Sinks
from titanlite.parallel.probe import BlockStatistics
from titanlite.parallel.sharded_model import ShardedModel


class ProbeMetrics(OpenMetric):
    """Extremes over the blocks and heads. The values of all blocks go to the table `probe`.

    Metrics:
        probe/residual_rms_last: root mean square of the residual stream after the last block
        probe/residual_max, probe/residual_max_block: largest magnitude after any block, and the block
        probe/attention_logit_max, probe/attention_logit_max_head: largest attention logit of any head (query
            times key, scaled by 1 / sqrt(head_dim)), and block and head
        probe/attention_entropy_min, probe/attention_entropy_min_head (nats): smallest mean entropy of a
            head's attention probabilities, and block and head
        probe/dead_units_pct, probe/dead_units_pct_block (%): largest share of dead MLP units in any block,
            and the block
    """

    def __init__(
        self,
        model: ShardedModel,
        sinks: Sinks,
        is_due: Callable[[int], bool],
        untimed: Callable[[str], AbstractContextManager[None]],
    ):
        """`is_due`: whether a step has a probe. `untimed`: Meter.untimed."""
        self._model, self._sinks, self._is_due, self._untimed = model, sinks, is_due, untimed

    def measure(self, step: StepResult) -> dict[str, Any]:
        """The metrics of a probe with the first micro-batch, if one is due. Waits for the device.
        Collective."""
        if not self._is_due(step.step):
            return {}
        with self._untimed("time/probe_s"):
            blocks = self._model.probe(step.micro_batches[0])
        self._sinks.table(step.step, "probe", {"blocks": [asdict(block) for block in blocks]})
        return probe_metrics(blocks)


def probe_metrics(blocks: Sequence[BlockStatistics]) -> dict[str, Any]:
    """The metrics of a probe: the extremes over blocks and heads, and where they are. A NaN is an extreme, so
    that the metrics name the first block or head that has one."""
    residual = {b.block: b.residual_max for b in blocks}
    logits = {f"{b.block} head {i}": value for b in blocks for i, value in enumerate(b.attention_logit_max)}
    entropies = {f"{b.block} head {i}": value for b in blocks for i, value in enumerate(b.attention_entropy)}
    dead = {b.block: b.dead_units_pct for b in blocks if b.dead_units_pct is not None}
    metrics: dict[str, Any] = {"probe/residual_rms_last": blocks[-1].residual_rms}
    for key, place_key, extreme, values in (
        ("probe/residual_max", "probe/residual_max_block", max, residual),
        ("probe/attention_logit_max", "probe/attention_logit_max_head", max, logits),
        ("probe/attention_entropy_min", "probe/attention_entropy_min_head", min, entropies),
        ("probe/dead_units_pct", "probe/dead_units_pct_block", max, dead),
    ):
        if values:
            not_numbers = [place for place, value in values.items() if math.isnan(value)]
            place = not_numbers[0] if not_numbers else extreme(values, key=values.__getitem__)
            metrics |= {key: values[place], place_key: place}
    return metrics
