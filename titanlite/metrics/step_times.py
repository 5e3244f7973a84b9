"""The times of a step by phase."""

from __future__ import annotations

from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.ranks import Ranks
from titanlite.step_clock import Phase

PHASE_METRICS: dict[Phase, str] = {
    "data": "time/data_s",
    "forward": "time/forward_s",
    "statistics": "time/statistics_s",
    "backward": "time/backward_s",
    "forward_backward": "time/forward_backward_s",
    "optimizer": "time/optimizer_s",
}


class StepTimes(OpenMetric):
    """Seconds per step by phase, in detailed reports.

    Metrics:
        time/data_s (s): wait for the batches
        time/forward_s (s): forward and loss
        time/statistics_s (s): [statistics of token losses](#the-loss-in-detail)
        time/backward_s (s): backward, with the reduction of gradients
        time/forward_backward_s (s): with pipeline parallel and CUDA graphs: both, with a pipeline's bubbles
        time/optimizer_s (s): gradient norm, clipping, optimizer step, and the wait for a save that still
            copies weights
        time/communication_wait_s (s): with several ranks: waits for collectives
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def measure(self, step: StepResult) -> dict[str, float]:
        """The metrics; {} if no step was measured. Waits for the device."""
        times = self._ranks.clock.times() if step.is_detailed else None
        if times is None:
            return {}
        values = {PHASE_METRICS[name]: s for name, s in times.phases.items() if name in PHASE_METRICS}
        return values | ({"time/communication_wait_s": times.wait_s} if self._ranks.size > 1 else {})
