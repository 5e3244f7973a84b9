"""The metrics of experts: how evenly the tokens of a step were spread over them."""

from __future__ import annotations

import torch

from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.metrics.sinks.base import Sinks
from titanlite.parallel.expert_loads import ExpertLoads


class ExpertMetrics(OpenMetric):
    """Loads of the experts. A detailed report has the table of their loads, too.

    Metrics:
        moe/max_violation, moe/max_violation_mean (share): models with experts: how far the busiest expert is
            above the mean of its layer; the largest and the mean of all layers
            ([balance](moe.md#load-balance)). 0 is balanced; the console shows the first
        moe/dead_experts (experts): experts without a token in this step, of all layers
        moe/router_entropy (nats): entropy of the router's mean probabilities, the mean of all layers; log E
            if they are equal
        moe/balance_loss: E x sum of f P with this step's loads f, the mean of all layers; 1 is balanced.
            Measured with every `moe.load_balance`
        moe/forced: 1 with `moe.force_load_balance`, otherwise absent; the console says `forced load balance`
        moe/z_loss (nats per token): z-loss of the routers, with `moe.z_loss_coeff`, the sum of all layers;
            not part of `train/loss`
        moe/max_rank_load: with experts on several ranks: tokens of the busiest rank over the mean of the
            ranks, the largest of all layers. Counts of several groups of ranks that share out the experts are
            added first
    """

    def __init__(self, loads: ExpertLoads, sinks: Sinks):
        self._loads, self._sinks = loads, sinks

    def measure(self, step: StepResult) -> dict[str, float]:
        """The metrics; {} without experts. Waits for the device."""
        if not self._loads.names:
            return {}
        if step.is_detailed:
            self._sinks.table(step.step, "expert_loads", {"tokens": load_table(self._loads)})
        return load_metrics(self._loads)


def load_metrics(loads: ExpertLoads) -> dict[str, float]:
    """The metrics of the newest step. Waits for the device."""
    num_experts, settings = loads.num_experts, loads.settings
    counts_LE, sums_LE, z_L1 = loads.sums.cpu().double().split([num_experts, num_experts, 1], dim=1)
    mean_L = counts_LE.mean(1)
    violation_L = counts_LE.amax(1) / mean_L - 1
    shares_LE = counts_LE / counts_LE.sum(1, keepdim=True)
    probabilities_LE = sums_LE / sums_LE.sum(1, keepdim=True)
    metrics = {
        "moe/max_violation": violation_L.max(),
        "moe/max_violation_mean": violation_L.mean(),
        "moe/dead_experts": (counts_LE == 0).sum(),
        "moe/router_entropy": torch.special.entr(probabilities_LE).sum(1).mean(),
        "moe/balance_loss": num_experts * (shares_LE * probabilities_LE).sum(1).mean(),
    }
    if settings.force_load_balance:
        metrics["moe/forced"] = torch.ones(())
    if settings.z_loss_coeff:
        metrics["moe/z_loss"] = settings.z_loss_coeff * z_L1.sum() / loads.num_positions
    if loads.expert_ranks > 1:
        loads_LR = counts_LE.unflatten(1, (loads.expert_ranks, -1)).sum(-1)
        metrics["moe/max_rank_load"] = (loads_LR / loads_LR.mean(1, keepdim=True)).max()
    return {key: value.item() for key, value in metrics.items()}


def load_table(loads: ExpertLoads) -> dict[str, list[int]]:
    """The tokens of each expert in the newest step, by the name of the layer. Waits for the device."""
    return dict(zip(loads.names, loads.sums[:, : loads.num_experts].long().tolist()))
