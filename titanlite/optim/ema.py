"""`[ema]`: an exponential moving average of the weights, kept in addition to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from titanlite.config.amount import Interval, Steps
from titanlite.config.component import ConfigError, check_at_least
from titanlite.mesh import local_shard, plain_shard
from titanlite.torch_compat import foreach_copy, foreach_lerp, plain_tensor


@dataclass(frozen=True, kw_only=True)
class EMA:
    """An exponential moving average of the weights, which training never reads; `titanlite export --ema`
    exports it."""

    enable: bool = False
    """Keep the average: 4 bytes per parameter in memory and in checkpoints, and twice the time of
    validation."""
    decay: float = 0.999
    """Share of the average that a step keeps. The average is mostly of the last 1 / (1 - decay) steps."""
    start_step: Steps = 0
    """Last step at which the average equals the weights."""
    freq: Interval = 1
    """Steps between updates after start_step. An update keeps decay^freq of the average."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"{self.decay} is not in [0, 1)", "decay")
        check_at_least(self, 0, "start_step")
        check_at_least(self, 1, "freq")

    def describe(self) -> list[str]:
        """A line for the log, if the average is kept."""
        often = "every step" if self.freq == 1 else f"every {self.freq} steps"
        line = f"exponential moving average of the weights: decay {self.decay:g}, updated {often}"
        return [line + (f" after step {self.start_step}" if self.start_step else "")] if self.enable else []


class WeightAverage:
    """The average of the trained parameters of `net`, which begins equal to them; empty if `config` does not
    enable it. Buffers are not averaged.

    `tensors`: the average by parameter name, each tensor sharded like its parameter."""

    def __init__(self, config: EMA, net: nn.Module):
        self._config = config
        parameters = net.named_parameters() if config.enable else ()
        trained = {name: p for name, p in parameters if p.requires_grad}
        for name, p in trained.items():
            if p.dtype != torch.float32:  # an update would be lost in the rounding of a 16-bit average
                raise ConfigError(f"{name} is {p.dtype}; only float32 weights are averaged", "ema.enable")
        self.tensors = {name: plain_tensor(p.detach()).clone() for name, p in trained.items()}
        self._parameters = list(trained.values())
        self._averages = [local_shard(tensor) for tensor in self.tensors.values()]

    @torch.no_grad()
    def update(self, step: int, applied: torch.Tensor) -> None:
        """Update the average after a step of the optimizer. `applied`: bool scalar on the device, False if
        the step was skipped; the average then stays bit-identical. Not collective, and does not wait for the
        device unless the weights are on the CPU."""
        config, num_steps = self._config, step - self._config.start_step
        if not self._averages or (num_steps > 0 and num_steps % config.freq):
            return
        if num_steps <= 0:
            foreach_copy(self._averages, self._weights())
            return
        # A skipped step has left the weights finite, so a factor of 0 keeps the average exactly.
        factor = applied.to(self._averages[0].device) * (1 - config.decay**config.freq)
        foreach_lerp(self._averages, self._weights(), factor)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """In the body, the model's parameters hold the average, and the average the weights. Needs the memory
        of one shard. Values that the model derives from its weights are not updated. Not collective."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights(), self._averages):
            spare = weight.clone()
            weight.copy_(average)
            average.copy_(spare)

    def _weights(self) -> list[torch.Tensor]:
        """This rank's shards of the parameters. Looked up anew each time, because FSDP may replace a shard by
        a padded copy in its first forward."""
        return [plain_shard(p) for p in self._parameters]
