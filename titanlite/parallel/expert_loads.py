"""The loads of experts on any layout. One all-reduce per step adds up what the routers of all ranks have
counted. The balance loss of the next step, the routers' correction biases and the metrics follow from the sum
and are therefore equal on every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.models.load_balance import CORRECTION_BIAS, LoadBalance, RouterLoad
from titanlite.models.moe import MoE
from titanlite.step_clock import StepClock
from titanlite.torch_compat import all_reduce, foreach_copy

EXACT = 1 << 24  # the largest fp32 number up to which all whole numbers are fp32 numbers


def _layers(net: Decoder) -> dict[str, MoE]:
    """The layers of experts by name."""
    return {name: layer for name, layer in net.moe_layers().items() if isinstance(layer, MoE)}


def check_routers(net: Decoder, settings: LoadBalance) -> None:
    """Raises ConfigError if the settings balance by a bias that the routers of `net` do not have."""
    routers = [layer.gate for layer in _layers(net).values()]
    if settings.load_balance == "bias" and not all(hasattr(router, CORRECTION_BIAS) for router in routers):
        raise ConfigError(
            f'the routers of this model family have no {CORRECTION_BIAS}; use "global"', "moe.load_balance"
        )


def limit_counts_(counts: torch.Tensor) -> None:
    """Limit sums of fp32 counts to 2^24, in place. Then they do not depend on the order of the additions:
    these are exact up to 2^24, and rounding takes no larger sum below it."""
    counts.clamp_(max=EXACT)


class ExpertLoads:
    """Counts and balances the loads of the experts of `net`, the whole model before it is split into pipeline
    stages. `counts_in_forward`: see RouterLoad.enable. `expert_ranks`: the ranks that share the experts of a
    layer. `clock`: measures the waits for other ranks."""

    def __init__(
        self,
        net: Decoder,
        settings: LoadBalance,
        mesh: Mesh,
        counts_in_forward: bool,
        clock: StepClock,
        expert_ranks: int = 1,
    ):
        check_routers(net, settings)
        self.settings, self.mesh, self.clock = settings, mesh, clock
        self.counts_in_forward, self.expert_ranks = counts_in_forward, expert_ranks
        self.names = list(layers := _layers(net))
        self.num_experts = next((layer.gate.load.num_experts for layer in layers.values()), 0)
        self._layers: list[MoE] = []  # of this rank
        self._rows = torch.empty(0)  # the indices of these layers in the model
        self.num_positions = 0
        """Number of positions of the newest step, over all ranks and micro-batches."""
        self.sums = torch.empty(0)
        """Statistics of the newest step over all ranks, fp32 [layers, 2 E + 1]: for each layer, the tokens of
        each expert (with same bits, at most 2^24), the sums of the router's probabilities, and the z-loss."""

    def enable(self, net: Decoder) -> None:
        """Count and balance from now on in `net`, this rank's part of the model, whose buffers are
        allocated."""
        layers = _layers(net)
        if not layers:
            return
        self._layers = list(layers.values())
        for load in self._loads:
            load.enable(self.settings, self.counts_in_forward, self._sum_over_sequence_ranks())
        device = self._loads[0].tokens_per_expert.device
        self._rows = torch.tensor([self.names.index(name) for name in layers], device=device)

    def _sum_over_sequence_ranks(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """See RouterLoad.enable."""
        degrees, mesh = self.mesh.degrees, self.mesh
        meshes = [*([mesh.cp] if degrees.cp > 1 else []), *([mesh.tp] if degrees.tp > 1 else [])]

        def summed(counts_BE: torch.Tensor) -> torch.Tensor:
            for axis in meshes:
                counts_BE = all_reduce(counts_BE, "sum", axis)
            return counts_BE

        return summed if meshes else None

    @property
    def _loads(self) -> list[RouterLoad]:
        return [layer.gate.load for layer in self._layers]

    @torch.no_grad()
    def begin_step(self, micro_batches: Sequence[Batch]) -> None:
        """Prepare the losses of a step on these micro-batches of this rank."""
        loads, settings = self._loads, self.settings
        num_experts, ranks = self.num_experts, self.mesh.dp_size
        positions = ranks * sum(batch.inputs.numel() for batch in micro_batches)
        sequences = ranks * sum(len(batch.inputs) for batch in micro_batches)
        self.num_positions = positions  # also on a rank without layers of experts, which may report
        if not loads:
            return
        for load in loads:
            load.begin_step()
        factors = torch.empty_like(loads[0].factors)
        # The mean over a sequence is the mean of those over each rank's tokens.
        sequence_ranks = self.mesh.degrees.cp * self.mesh.degrees.tp
        factors[0] = settings.sequence_coefficient * num_experts / sequences / sequence_ranks
        factors[1] = settings.z_loss_coeff / positions
        foreach_copy([load.factors for load in loads], [factors] * len(loads))
        if settings.load_balance == "global":
            tokens_LE = torch.stack([load.tokens_per_expert for load in loads])
            shares_LE = tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1)  # zero in the first step
            gradient_LE = shares_LE * (settings.coefficient * num_experts / positions)
            foreach_copy([load.share_gradient for load in loads], list(gradient_LE))

    @torch.no_grad()
    def after_step(self, applied: torch.Tensor) -> None:
        """Add up the statistics of a step over all ranks, and update the state unless the step was skipped.
        `applied`: bool scalar, False if it was skipped. Collective."""
        if not self.names:
            return
        self.sums = torch.zeros(len(self.names), 2 * self.num_experts + 1, device=applied.device)
        if self._layers:
            statistics = torch.stack([load.step_statistics() for load in self._loads])
            self.sums.index_copy_(0, self._rows, statistics)
        if self.mesh.device_mesh is not None:
            with self.clock.waiting():
                dist.all_reduce(self.sums)
        if self.mesh.same_bits:
            limit_counts_(self.sums[:, : self.num_experts])
        if self._layers:
            self._update(self.sums[:, : self.num_experts].index_select(0, self._rows), applied)

    def _update(self, counts_LE: torch.Tensor, applied: torch.Tensor) -> None:
        """Update the state of this rank's layers. `counts_LE`: tokens per expert of these layers."""
        tokens = [load.tokens_per_expert for load in self._loads]
        foreach_copy(tokens, list(torch.where(applied, counts_LE, torch.stack(tokens))))
        if self.settings.load_balance == "bias":
            biases = [getattr(layer.gate, CORRECTION_BIAS) for layer in self._layers]
            counts_LE = counts_LE.long()  # exact, so that the sign is the same on every device
            below_mean_LE = (counts_LE.sum(1, keepdim=True) - self.num_experts * counts_LE).sign()
            steps_LE = self.settings.coefficient * below_mean_LE * applied
            foreach_copy(biases, list(torch.stack(biases) + steps_LE))
