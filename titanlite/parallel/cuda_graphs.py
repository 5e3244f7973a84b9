"""CUDA graphs: forward and backward of a micro-batch are recorded once and then launched as a whole, so that
the device does not wait for the host between kernels. The same kernels run on the same values: results are
equal to a run without graphs.

A graph reads its inputs from and writes its results to fixed addresses. Inputs are copied there before each
launch, results are copied from there, and gradients stay there until the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch
from titanlite.log import logger
from titanlite.models.base import Decoder

STEPS_WITHOUT_GRAPHS = 2  # kernels are compiled and libraries allocate their workspaces


class MicroBatchLosses(NamedTuple):
    """The results of forward and backward of a micro-batch, detached, each divided by the step's number of
    targets: the sum of token losses, and the auxiliary losses of the model by name. `of_loss`: the sums of
    the loss's auxiliary losses, not divided; None: it has none."""

    tokens: torch.Tensor
    auxiliary: dict[str, torch.Tensor]
    of_loss: torch.Tensor | None

    def clone(self) -> MicroBatchLosses:
        """The same values in other memory."""
        auxiliary = {name: value.clone() for name, value in self.auxiliary.items()}
        return MicroBatchLosses(
            self.tokens.clone(), auxiliary, None if self.of_loss is None else self.of_loss.clone()
        )


@dataclass(frozen=True)
class _Graph:
    """A recorded graph with its inputs, results and, if it makes them, gradients."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    num_targets: torch.Tensor
    losses: MicroBatchLosses
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor]]


class CudaGraphs:
    """Runs micro-batches by two graphs, both for the newest shape of micro-batches: one for a step's first
    micro-batch, which makes the gradients, and one for the following ones, which adds to them.

    `run(batch, num_targets)`: forward and backward of a micro-batch. It must not wait for the device.
    `optional`: run without graphs if the GPU has too little memory for them."""

    def __init__(
        self, net: Decoder, run: Callable[[Batch, torch.Tensor], MicroBatchLosses], optional: bool = False
    ):
        self._net, self._run, self._optional = net, run, optional
        self._shape: torch.Size | None = None
        self._steps_left = 0
        self._fits = True
        self._graphs: dict[bool, _Graph] = {}
        self._pool: Any = None

    def begin_step(self, batch: Batch) -> bool:
        """Whether this step, whose first micro-batch is `batch`, runs by graphs. The first two steps of each
        shape of micro-batches do not."""
        if batch.inputs.shape != self._shape:
            self._shape, self._steps_left = batch.inputs.shape, STEPS_WITHOUT_GRAPHS
            self._graphs, self._pool, self._fits = {}, torch.cuda.graph_pool_handle(), True
        self._steps_left -= 1
        if self._steps_left == -1 and self._optional:
            self._fits = _fits(self._shape)
        return self._steps_left < 0 and self._fits

    def forward_backward(self, batch: Batch, num_targets: torch.Tensor, is_first: bool) -> MicroBatchLosses:
        """Accumulate the gradients of a micro-batch. `is_first`: it is the step's first one. Raises
        ConfigError if the model cannot be recorded."""
        if is_first not in self._graphs:
            self._graphs[is_first] = self._record(batch, num_targets, is_first)
        recorded = self._graphs[is_first]
        recorded.batch.inputs.copy_(batch.inputs)
        recorded.batch.targets.copy_(batch.targets)
        recorded.num_targets.copy_(num_targets)
        for parameter, gradient in recorded.gradients:
            parameter.grad = gradient
        recorded.graph.replay()
        return recorded.losses.clone()

    def _record(self, batch: Batch, num_targets: torch.Tensor, is_first: bool) -> _Graph:
        batch = replace(batch, inputs=batch.inputs.clone(), targets=batch.targets.clone())
        num_targets, graph = num_targets.clone(), torch.cuda.CUDAGraph()
        try:
            # thread_local: the loader's thread may allocate pinned memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                losses = self._run(batch, num_targets)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise ConfigError(
                f"the model cannot be recorded as a CUDA graph: {str(e).splitlines()[0]}",
                "compile.cuda_graphs",
            ) from e
        parameters = self._net.parameters() if is_first else ()
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        if is_first:
            logger.info(f"recorded a CUDA graph for micro-batches of {tuple(batch.inputs.shape)} tokens")
        return _Graph(graph, batch, num_targets, losses, gradients)


def _fits(shape: torch.Size) -> bool:
    """Whether the GPU has memory for the graphs of micro-batches of this shape, beside the memory of a step
    without graphs. Both take about what the steps before have left in the allocator's cache."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0]
    if free < cached:
        logger.info(
            f"no CUDA graph for micro-batches of {tuple(shape)} tokens: it would take {cached / 2**30:.1f} "
            f"GiB, and {free / 2**30:.1f} GiB are free"
        )
    return free >= cached
