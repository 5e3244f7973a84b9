"""Metric: the contract of a metric, which measures one step and returns numbers by name.

A class that reports metrics lists them in its docstring, under `Metrics:`, one entry per name:
`name, name (unit): meaning`. docs/metrics.md shows these entries. A word in capitals stands for a name that
the run knows, such as NAME in `loss/source/NAME`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titanlite.config.component import Component, ConfigError, full_name
from titanlite.data.batch import Batch
from titanlite.data.step_sizes import StepSize
from titanlite.metrics.token_statistics import TokenStatistics
from titanlite.parallel.clip import GradNorms
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.runtime.runtime import Runtime
from titanlite.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class StepResult:
    """The result of one step, when its update is done. Tensors are on the device."""

    step: int
    """The number of the step, from 1."""
    size: StepSize
    """The number of sequences of the step, over all ranks."""
    first_sequence: int
    """The number of the step's first sequence in the data order."""
    micro_batches: Sequence[Batch]
    """The micro-batches of this rank."""
    num_targets: torch.Tensor
    """Number of targets that count, over all ranks; int64 scalar."""
    loss: torch.Tensor
    """Mean loss over all targets, over all ranks; fp32 scalar."""
    grad_norms: GradNorms
    """Norms of the gradients before clipping."""
    applied: torch.Tensor
    """Whether the optimizer applied the update; bool scalar. False: the guard skipped the step."""
    token_statistics: TokenStatistics | None
    """Statistics of the losses of this rank's tokens, in steps with a detailed report; otherwise None."""

    @property
    def is_detailed(self) -> bool:
        """Whether the step has a detailed report, which metrics that cost time wait for."""
        return self.token_statistics is not None


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The parts of a run that metrics may read, and must not change."""

    model: ShardedModel
    """The model on this rank; `model.net` has the parameters, sharded."""
    optimizer: torch.optim.Optimizer
    """The optimizer, with the state of this rank's shards."""
    rt: Runtime
    """This rank, the device and the mesh; `rt.ranks` has sums and maxima over the ranks."""
    tokenizer: Tokenizer
    """The tokenizer."""


class OpenMetric(ABC):
    """A metric of a run, on one rank."""

    @abstractmethod
    def measure(self, step: StepResult) -> dict[str, Any]:
        """The values of the metrics by name: int, float or str, or tensors with one element; {} if there is
        nothing to report. All ranks call it for each reported step, and rank 0's values are reported. It may
        wait for the device, and use collectives if all ranks do. It must not change the run."""


def values_of(metric: OpenMetric, step: StepResult) -> dict[str, int | float | str]:
    """The values of a metric in a step, with tensors of one element and NumPy's numbers as numbers. Raises
    ConfigError, which names the metric's class, for anything else. Waits for the device. Collective."""
    measured, source = metric.measure(step), f"{full_name(type(metric))}.measure"
    if not isinstance(measured, dict):
        raise ConfigError(f"{source} returned {measured!r}; expected a dict of names and values")
    values = dict[str, int | float | str]()
    for name, value in measured.items():
        if getattr(value, "size", None) == 1 or (isinstance(value, torch.Tensor) and value.numel() == 1):
            value = value.item()
        if not isinstance(name, str) or name == "step" or type(value) not in (int, float, str):
            raise ConfigError(
                f"{source} returned {value!r} for {name!r}; expected a name other than 'step', and an int, a "
                "float, a str or a tensor with one element"
            )
        values[name] = value
    return values


@dataclass(frozen=True, kw_only=True)
class Metric(Component, makes=(OpenMetric,)):
    """The base class of metrics that `[[metrics.extra]] name = "..."` selects."""

    @abstractmethod
    def build(self, run: MeasuredRun) -> OpenMetric:
        """Open the metric for a run, on each rank. Raises ConfigError for a setting that cannot work."""
