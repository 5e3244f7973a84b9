"""Statistics of every parameter for detailed reports: norms of gradient and weight, the size of the update
relative to the weight, and the gradient noise scale."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.mesh import num_ranks_and_copies, plain_shard
from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.metrics.sinks.base import Sinks
from titanlite.optim.base import Optimizer
from titanlite.parallel.clip import Clipper
from titanlite.ranks import Ranks
from titanlite.torch_compat import foreach_norm


class ParameterReport(NamedTuple):
    """Statistics of the trained parameters of the whole model, in the order of `names`; equal on all ranks.

    `update_ratios`: norm of the newest update relative to the norm of the weight; None: unknown, or the step
    was skipped, or the weight is 0. `signal`, `noise`: squared norm of the expected gradient, and expected
    squared distance of a step's gradient from it; None: unknown."""

    names: list[str]
    grad_norms: list[float]
    weight_norms: list[float]
    update_ratios: list[float | None]
    signal: float | None
    noise: float | None

    def table(self) -> dict[str, Any]:
        """Norm of the gradient, norm of the weight and update ratio by name, for the sinks."""
        columns = zip(self.names, self.grad_norms, self.weight_norms, self.update_ratios)
        return {"parameters": {name: numbers for name, *numbers in columns}}

    def metrics(self, sequences_per_step: int) -> dict[str, Any]:
        """The metrics: extremes with the names of their parameters, and the noise scale.
        `sequences_per_step`: the global batch size."""
        norms = [math.inf if math.isnan(norm) else norm for norm in self.grad_norms]  # max() finds a NaN
        place = norms.index(max(norms))
        values: dict[str, Any] = {
            "norms/grad_max": self.grad_norms[place],
            "norms/grad_max_name": self.names[place],
            "norms/weight": math.hypot(*self.weight_norms),
        }
        ratios = [(ratio, name) for ratio, name in zip(self.update_ratios, self.names) if ratio is not None]
        if ratios:
            values["norms/update_ratio_min"], values["norms/update_ratio_min_name"] = min(ratios)
            values["norms/update_ratio_median"] = statistics.median(ratio for ratio, _ in ratios)
            values["norms/update_ratio_max"], values["norms/update_ratio_max_name"] = max(ratios)
        if self.signal is not None and self.noise is not None:
            values["train/noise_scale_signal"] = self.signal
            values["train/noise_scale_noise"] = self.noise
            if min(self.signal, self.noise) > 0:
                values["train/noise_scale_sequences"] = sequences_per_step * self.noise / self.signal
        return values


class ParameterMetrics(OpenMetric):
    """Norms, update ratios, clipping and the gradient noise scale, in detailed reports. The norms of every
    parameter go to the table `parameters`.

    Metrics:
        norms/grad_max, norms/grad_max_name: largest norm of a parameter's gradient before clipping, and the
            parameter; the first that is not finite, if any
        norms/weight: norm of all trained weights after the step
        norms/update_ratio_min, norms/update_ratio_min_name: smallest norm of an update relative to the norm
            of its weight, and the parameter
        norms/update_ratio_median: the median over parameters
        norms/update_ratio_max, norms/update_ratio_max_name: the largest, and the parameter
        train/clipped_tensors (share): with `training.clip = "tensor"`: parameters whose gradient was scaled
            down
        train/noise_scale_signal: estimate of the squared norm of the expected gradient
        train/noise_scale_noise: estimate of the gradient's variance in a step, summed over all elements
        train/noise_scale_sequences (sequences): the noise scale from these two; absent if one is not above 0
    """

    def __init__(self, statistics: ParameterStatistics, clipper: Clipper, sinks: Sinks, ranks: Ranks):
        self._statistics, self._clipper, self._sinks, self._ranks = statistics, clipper, sinks, ranks

    def measure(self, step: StepResult) -> dict[str, Any]:
        """The metrics. Waits for the device. Collective."""
        if not step.is_detailed:
            return {}
        names, norms = step.grad_norms.names, step.grad_norms.norms
        report = self._statistics.measure(dict(zip(names, norms.tolist())), applied=bool(step.applied))
        self._sinks.table(step.step, "parameters", report.table())
        values = report.metrics(step.size.global_batch_size)
        if self._clipper.num_clipped is not None:
            num_clipped, num = self._ranks.sum_scalars(self._clipper.num_clipped, torch.tensor(len(names)))
            values["train/clipped_tensors"] = (num_clipped / num).item()
        return values


class ParameterStatistics:
    """Measures the statistics of every parameter on any layout. Collective. `net`, `optimizer`: this rank's
    stages and shards. `config`: the optimizer's component."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, config: Optimizer, ranks: Ranks):
        self._optimizer, self._config, self._ranks = optimizer, config, ranks
        names: dict[torch.Tensor, str] = {p: name for name, p in net.named_parameters()}
        self._groups = {names[p]: (p, group) for group in optimizer.param_groups for p in group["params"]}
        own = [name for name in names.values() if name in self._groups]
        self._names = list(dict.fromkeys(name for names in ranks.all_gather(own) for name in names))

    @torch.no_grad()
    def measure(self, grad_norms: Mapping[str, float], applied: bool) -> ParameterReport:
        """Measure after an optimizer step. Collective, with one all-reduce; waits for the device.

        `grad_norms`: norms of the whole gradients of this rank's parameters, by name. `applied`: False if
        the step was skipped. The update is recomputed from the optimizer's state, one parameter at a time, so
        no copy of the weights is needed."""
        columns = {name: i for i, name in enumerate(self._names)}
        table = torch.zeros(5, len(columns), dtype=torch.float64)
        for name, shares in self._shares(applied).items():
            ranks, copies = num_ranks_and_copies(self._groups[name][0])
            table[0, columns[name]] = grad_norms.get(name, 0.0) / ranks
            table[1:, columns[name]] = torch.tensor(shares, dtype=torch.float64) / copies
        table = self._ranks.sum(table.float().to(self._ranks.device))
        grads, weights, updates, signal, noise = table.tolist()
        weights = [math.sqrt(square) for square in weights]
        ratios = [
            math.sqrt(update) / weight if weight and math.isfinite(update) else None
            for update, weight in zip(updates, weights)
        ]
        sums = [sum(signal), sum(noise)]
        known = all(map(math.isfinite, sums))
        return ParameterReport(self._names, grads, weights, ratios, *(sums if known else (None, None)))

    def _shares(self, applied: bool) -> dict[str, list[float]]:
        """By parameter, this rank's shares of: squared norm of the weight, squared norm of the update, signal
        and noise. NaN: unknown."""
        shards = {name: plain_shard(p.detach()) for name, (p, _) in self._groups.items()}
        if not shards:
            return {}
        states, rows = self._states(), list[torch.Tensor]()
        for (name, shard), norm in zip(shards.items(), _norms(list(shards.values()))):
            group, state = self._groups[name][1], states[name]
            update = self._config.update_of(shard, state, group) if applied and state else None
            unknown = torch.full_like(norm, math.nan)
            update_norm = unknown if update is None else _norms([update])[0]
            moments = self._config.signal_and_noise(state, group) if state else None
            rows += [norm, update_norm, *((unknown, unknown) if moments is None else moments)]
        numbers = torch.stack([value.float() for value in rows]).view(-1, 4).tolist()
        return {name: [norm**2, update**2, *rest] for name, (norm, update, *rest) in zip(shards, numbers)}

    def _states(self) -> dict[str, dict[str, Any]]:
        """The optimizer state of each parameter, with numbers in place of scalars, which are read at once.
        All state of a parameter that is itself a scalar stays tensors."""
        states, scalars = dict[str, dict[str, Any]](), list[tuple[str, str]]()
        for name, (parameter, _) in self._groups.items():
            state = self._optimizer.state.get(parameter, {})
            states[name] = {key: plain_shard(tensor) for key, tensor in state.items()}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim == 0 < parameter.ndim:
                    scalars.append((name, key))
        if scalars:
            values = torch.stack([states[name][key].to(self._ranks.device).float() for name, key in scalars])
            for (name, key), value in zip(scalars, values.tolist()):
                states[name][key] = value
        return states


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each tensor; in fp64 on CPU, where torch sums sequentially."""
    dtype = torch.float64 if tensors[0].device.type == "cpu" else None
    return list(foreach_norm(tensors, dtype=dtype))
