"""Sums that do not depend on the number of data-parallel ranks, for training.same_bits_on_any_ranks.

The unit is the micro-batch: it has the same sequences, shape and kernels on every layout, and micro-step k of
rank r of N is micro-batch k N + r. Gradients of micro-batches are added one after the other, in this order,
in fp32. Their losses, and the squares of gradients for norms, are added in fp64, in an order that follows
from the number of micro-batches and the shapes of the whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlite.config.component import ConfigError
from titanlite.mesh import Mesh, local_shard_and_offsets
from titanlite.parallelism import Degrees, check_data_parallel_only
from titanlite.torch_compat import computation_memory, foreach_norm

KEY = "training.same_bits_on_any_ranks"
BLOCK = 1 << 24  # values whose squares are computed at a time


def check_same_bits(degrees: Degrees, expert_degree: int, unsupported: dict[str, bool]) -> None:
    """Raises ConfigError for a layout, or a setting in use, that cannot keep the promise. `unsupported`:
    settings by key, and whether they are on."""
    check_data_parallel_only(KEY, degrees, expert_degree, unsupported)
    if degrees.dp_replicate > 1 and degrees.dp_shard == 1:
        raise ConfigError(
            f"not with {degrees.dp_replicate} unsharded copies; set "
            "--parallelism.data_parallel_replicate_degree=1 to shard them",
            KEY,
        )


class OrderedReduceScatter:
    """FSDP's reduce-scatter, which adds gradients in the order of the micro-batches.

    Each rank receives its shard of the gradients of all ranks, in the compute dtype, and adds them in the
    order of the ranks to an fp32 sum that lives through the step and is FSDP's gradient itself. Therefore the
    gradients that the micro-batch before has left must be set to None (`forget_gradients`).

    With several replicas (HSDP), a rank adds one part of its shard, and the other parts are zero: the
    all-reduce over the replicas that FSDP makes then adds zeros to each part, which is exact."""

    def __init__(self, mesh: Mesh, empty: Callable[..., torch.Tensor] = torch.empty):
        """`empty`: allocates memory for sums."""
        self._empty = empty
        self._num_replicas, self._num_shards = mesh.degrees.dp_replicate, mesh.degrees.dp_shard
        self._replica = mesh.coordinate.dp_replicate
        self._sum: torch.Tensor | None = None
        self._is_input, self._num_added = True, 0

    def begin_step(self) -> None:
        """The next micro-batch is the first of a step."""
        self._sum, self._is_input, self._num_added = None, True, 0

    def end_step(self, num_micro_batches: int) -> None:
        """Leave the memory of the sum to the gradients. Raises RuntimeError if a micro-batch gave parameters
        no gradient that others gave one: what was summed before it is lost."""
        num_added = self._num_added
        self.begin_step()
        if num_added not in (0, num_micro_batches):
            raise RuntimeError(
                f"{KEY} needs a gradient of each trained parameter in each micro-batch; some have one in "
                f"{num_added} of {num_micro_batches}"
            )

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gradients to send, or, at every second call, for the sum."""
        self._is_input = not self._is_input
        if not self._is_input:
            return torch.empty(*size, dtype=dtype, device=device)
        if self._num_replicas == 1 and self._sum is not None:
            assert self._sum.shape == torch.Size(size), "other parameters have gradients than before"
            return self._sum
        return self._empty(size, dtype=torch.float32, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        replicas, shards = self._num_replicas, self._num_shards
        part = -(-output_tensor.numel() // replicas)
        sent = input_tensor.view(shards, -1)
        if replicas > 1:
            sent = torch.nn.functional.pad(sent, (0, part * replicas - sent.shape[1]))
            # The rank of replica i and shard j has the number i * shards + j, and adds part i of shard j.
            sent = sent.view(shards, replicas, part).transpose(0, 1).contiguous()
            group = dist.group.WORLD  # type: ignore[assignment]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        is_first = self._sum is None
        self._num_added += 1
        if self._sum is None:
            self._sum = output_tensor if replicas == 1 else output_tensor.new_empty(part)
        _add_in_order(self._sum, received.view(replicas * shards, -1), is_first)
        if replicas > 1:
            own = slice(self._replica * part, min((self._replica + 1) * part, output_tensor.numel()))
            output_tensor.zero_()[own] = self._sum[: max(own.stop - own.start, 0)]


def _add_in_order(total: torch.Tensor, received: torch.Tensor, is_first: bool) -> None:
    """Add the rows of `received` one after the other to `total`, fp32. `is_first`: `total` has no value
    yet."""
    if total.is_cuda:
        from titanlite.parallel.same_bits_kernels import add_in_order

        add_in_order(total, received, is_first)
        return
    for i, gradient in enumerate(received):
        if is_first and i == 0:
            total.copy_(gradient)
        else:
            total.add_(gradient)


def apply_ordered_sums(net: nn.Module, mesh: Mesh) -> list[OrderedReduceScatter]:
    """Let all FSDP modules of `net` add gradients in the order of the micro-batches."""
    comms, on_cuda = [], mesh.fsdp.device_type == "cuda"
    for module in net.modules():
        if isinstance(module, FSDPModule):
            comms.append(OrderedReduceScatter(mesh, computation_memory(module) if on_cuda else torch.empty))
            module.set_custom_reduce_scatter(comms[-1])  # type: ignore[arg-type]
    return comms


def forget_gradients(net: nn.Module) -> None:
    """Set the gradients to None: FSDP would add the sum that OrderedReduceScatter returns to them."""
    for parameter in net.parameters():
        parameter.grad = None


def ordered_sum(values: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The sum of one fp32 scalar per micro-batch of the step, on data-parallel rank 0; zero on other ranks,
    so that a sum over ranks is exact. `values`: of this rank's micro-batches. Collective."""
    of_step = torch.zeros(len(values), mesh.dp_size, dtype=torch.float64, device=values[0].device)
    of_step[:, mesh.dp_rank] = torch.stack(list(values)).double()
    if mesh.dp_size > 1:
        dist.all_reduce(of_step)  # adds zeros
    total = _fold(of_step.view(1, -1))[0].float()
    return total if mesh.dp_rank == 0 else torch.zeros_like(total)


class Rows(NamedTuple):
    """The rows of a shard, `num` of `width` values, and the place of their sums in a flat tensor: the sum of
    row r has the index `begin + r // inner * stride + r % inner`."""

    num: int
    width: int
    begin: int
    inner: int
    stride: int


def squared_norms(gradients: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The squared norm of each whole gradient, fp64 [len(gradients)], equal bits on any number of ranks. A
    cell is a row, or for gradients with three dims a row of a row: FSDP shards experts along their second
    dim. Collective over the shards."""
    shapes = [gradient.shape[: min(max(gradient.ndim - 1, 1), 2, gradient.ndim)] for gradient in gradients]
    sizes = [shape.numel() for shape in shapes]
    of_all = torch.zeros(sum(sizes), dtype=torch.float64, device=gradients[0].device)
    begins = [0, *accumulate(sizes)]
    shards, places = list[torch.Tensor](), list[Rows]()
    for gradient, shape, begin in zip(gradients, shapes, begins):
        shard, offsets = local_shard_and_offsets(gradient)
        if not shard.numel():
            continue
        num = shard.shape[: len(shape)].numel()
        inner, stride = (shard.shape[1], shape[1]) if len(shape) == 2 else (1, 1)
        begin += sum(offset * n for offset, n in zip(offsets, (stride, 1)[: len(shape)]))
        shards.append(shard.contiguous())
        places.append(Rows(num, shard.numel() // num, begin, inner, stride))
    write_squares(shards, places, of_all)
    if mesh.degrees.dp_shard > 1:
        assert mesh.device_mesh is not None
        dist.all_reduce(of_all, group=mesh.device_mesh["dp_shard"].get_group())  # adds zeros
    # From here on all shapes are those of whole tensors, and kernels for equal shapes add in one order.
    return torch.stack(foreach_norm(of_all.split(sizes), 1))  # no cell is negative


def write_squares(shards: Sequence[torch.Tensor], places: Sequence[Rows], out: torch.Tensor) -> None:
    """Write the sum of the squares of each row of `shards`, contiguous, to `out`, fp64. The bits of a sum
    depend on its row alone."""
    if out.is_cuda and shards:
        from titanlite.parallel import same_bits_kernels

        same_bits_kernels.write_squares(shards, places, out)
        return
    for shard, place in zip(shards, places):
        rows = shard.view(place.num, place.width)
        blocks = rows.split(max(BLOCK // place.width, 1))  # fp64 copies of a whole head are large
        sums = torch.cat([_fold(block.double().square_()) for block in blocks])
        size = (place.num // place.inner, place.inner)
        out.as_strided(size, (place.stride, 1), place.begin).copy_(sums.view(size))


def _fold(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, [rows] from [rows, n], by adding halves: elementwise additions have the same order
    for any number of rows, which the reductions of torch have not."""
    while rows.shape[1] > 1:
        half = (rows.shape[1] + 1) // 2
        head, tail = rows[:, :half], rows[:, half:]
        rows = head.clone()
        rows[:, : tail.shape[1]] += tail
    return rows[:, 0]
