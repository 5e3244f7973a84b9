"""Private and version-dependent APIs of torch and torchao. Other modules do not use such APIs, except
runtime/agent.py, runtime/forked_ranks.py, runtime/nodes.py and runtime/rendezvous.py, which subclass classes
of torchrun.

Each function wraps one name that may be renamed or changed without notice, and its docstring states the
behaviour that titanlite relies on. tests/unit/test_torch_compat.py has a test per function, which fails when
the name or its behaviour changes. Tested with torch 2.11 to 2.13."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

# ---- distributed


def set_group_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Change the timeout of later collectives of `group`; None: the default group. torch has no public way to
    change the timeout of an existing group."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def gather_shards(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """All-gather the ranks' shards into one tensor. torch 2.13 has a new name for the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, shard, group=group)


def reduce_shards(shard: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Reduce-scatter: the sum over all ranks of this rank's shard of `values`. torch 2.13 has a new name for
    the function."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(shard, values, group=group)


def gloo_flight_record() -> str | None:
    """The last collectives of this process on gloo, as JSON; None if this torch records none. NCCL has a
    record of its own, which it writes to a file when a collective times out."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else dump().decode(errors="replace")


def flatten_mesh(mesh: DeviceMesh, name: str) -> None:
    """Flatten all dimensions of `mesh` into one dimension `name` of its root mesh, for `root[name]`."""
    mesh._flatten(name)


@contextmanager
def fake_process_group(rank: int, num_ranks: int) -> Iterator[None]:
    """Make this process `rank` of a default process group of `num_ranks` ranks, none of which exist. Groups
    and meshes of it can be made; its collectives return at once and leave tensors as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor_like(local: torch.Tensor, like: DTensor, shape: torch.Size | None = None) -> DTensor:
    """A DTensor with the mesh and placements of `like`, whose local shard is `local`. `shape`: its global
    shape; default: the shape of `like`. It may differ from that shape only in the size of dims that
    are divided evenly.

    DTensor.from_local would move `local` to the device of the mesh; this function leaves a shard in host
    memory.
    """
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    if shape is None:
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
    else:
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, like._spec.shallow_copy_with_tensor_meta(meta), requires_grad=False)


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """The index in the global tensor at which this rank's shard begins, for each dimension."""
    mesh = tensor.device_mesh
    return _local_offsets(tensor.shape, mesh, tensor.placements, tuple(mesh.get_coordinate() or ()))


@cache  # torch takes 30 us; `coordinate` is in the key because a dry run changes this process's rank
def _local_offsets(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Any, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def all_reduce(tensor: torch.Tensor, op: str, mesh: DeviceMesh) -> torch.Tensor:
    """`tensor` reduced by `op` ("sum" or "max") over the ranks of `mesh`, as a new tensor that torch.compile
    can trace. Has no gradient."""
    return funcol.all_reduce(tensor, op, mesh)


def all_gather_with_gradient(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks of `group`, concatenated along `dim`. The backward sums the gradients over
    ranks and scatters them. torch 2.13 renamed the function."""
    gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
    return gather(tensor, dim, group)


def all_to_all_with_gradient(
    tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send `sent[r]` rows of `tensor`, in order, to rank r of `group`. Returns the rows of all ranks in
    order, `received[r]` of rank r. The backward sends the gradients back."""
    return funcol.all_to_all_single_autograd(tensor, list(received), list(sent), group)


def skip_p2p_to_own_rank(stage: Any) -> None:
    """Skip sends from a rank to itself when a pipeline stage warms up its connections.

    torch 2.11 warms up point-to-point connections before the first step; torch 2.13 does not. With
    ZBVZeroBubble two neighbouring stages are on the last rank, and gloo cannot send to its own rank."""
    warm_up: Any = WeakMethod(stage._get_init_p2p_neighbors_ops)  # see after_weight_backward
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in warm_up()() if op.peer != dist.get_rank()]


def after_weight_backward(stage: Any, callback: Callable[[], None]) -> None:
    """Call `callback` after each weight backward of a pipeline stage. Zero-bubble schedules run the backward
    of the weights separately from the backward of the activations."""
    # Weak, so that the stage's buffers are freed with the stage: a run exempts the objects of its first step
    # from garbage collection.
    original: Any = WeakMethod(stage.backward_weight_one_chunk)

    def backward(*args: Any, **options: Any) -> None:
        original()(*args, **options)
        callback()

    stage.backward_weight_one_chunk = backward


def finish_weight_backward(module: torch.nn.Module) -> None:
    """Add the gradients of an FSDP module's gathered parameters to FSDP's accumulators, in its reduce dtype.

    FSDP does this at the end of its own backward, but not after the separate weight backward of a zero-bubble
    pipeline schedule. Without it, gradients of the next micro-batch would be added in bf16."""
    for group in _fsdp_groups(module):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reduce_fsdp_in_computation_memory(module: torch.nn.Module) -> None:
    """Let an FSDP module on CUDA allocate its reduced gradients on the default stream, on which the model has
    to run. torch allocates them on the stream of its reductions, whose memory nothing else can use."""
    for group in _fsdp_groups(module):
        group._reduce_scatter_comm.allocate = _computation_memory(group)


def computation_memory(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """`reduce_fsdp_in_computation_memory`'s function that allocates, for an FSDP module with one group of
    parameters. A module whose parameters all belong to modules within it reduces nothing: torch.empty."""
    groups = _fsdp_groups(module)
    assert len(groups) < 2, "FSDP shards the experts as modules of their own"
    return _computation_memory(groups[0]) if groups else torch.empty


def _computation_memory(group: Any) -> Callable[..., torch.Tensor]:
    """The function that allocates memory for the reductions of a group of parameters on the default stream.

    Safe because a result that becomes a gradient is freed only after the end of the backward, where the
    computation waits for all reductions, and because a reduction waits for all that was computed before it
    writes (foreach_reduce in torch's _fsdp_collectives.py), and for the allocation. A result that is cast, or
    added to an earlier gradient, would be freed while the other stream still reads it, and stays as torch has
    it."""
    return partial(_allocate_reduction, [p for p in group.fsdp_params if p.sharded_param.requires_grad])


def _allocate_reduction(
    parameters: Sequence[Any], size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory for the input of a reduction, for which FSDP calls on the stream that computes, or for its
    result, for which FSDP calls on the stream of the reduction."""
    if any(p.sharded_param.grad is not None or p.orig_dtype != dtype for p in parameters):
        return torch.empty(*size, dtype=dtype, device=device)
    default = torch.cuda.default_stream(device)
    with torch.cuda.stream(default):
        memory = torch.empty(*size, dtype=dtype, device=device)
    # With deterministic algorithms torch fills new memory with NaN, on the stream that allocates it. The
    # reduction, which has waited for that stream before this call, must not write before the NaN.
    torch.cuda.current_stream(device).wait_stream(default)
    return memory


def time_fsdp_waits(
    module: torch.nn.Module, timed: Callable[[Callable[..., Any]], Callable[..., Any]], on_cuda: bool
) -> None:
    """Replace the methods in which an FSDP module waits for its collectives by `timed(method)`.

    On CUDA the compute stream waits in them: for the all-gather before a forward or backward, for the
    reduce-scatter of the module before, and at the end of the backward. On a CPU the thread waits, and the
    all-gather itself is such a method, too. The methods also copy into and out of the collectives' buffers.
    The end of a backward that only accumulates gradients waits for nothing, and is not timed."""
    names = ["wait_for_unshard", "finalize_backward", *([] if on_cuda else ["unshard"])]
    for group in _fsdp_groups(module):
        for name in names:
            setattr(group, name, timed(getattr(group, name)))
        accumulate, reduce = group.post_backward, timed(group.post_backward)
        group.post_backward = partial(_post_backward, group, reduce, accumulate)


def _post_backward(group: Any, reduce: Callable[..., Any], accumulate: Callable[..., Any], *args: Any) -> Any:
    return reduce(*args) if group.reduce_grads else accumulate(*args)


@contextmanager
def take_local_gradients(module: torch.nn.Module, take: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """In the body, give each gradient of an FSDP module's gathered parameters to `take` at the end of the
    module's backward, and do not keep it. The gradients are this rank's own: backwards in the body must not
    reduce (`set_requires_gradient_sync(False)`)."""
    groups = _fsdp_groups(module)
    replaced = [vars(group).get("post_backward") for group in groups]  # by time_fsdp_waits
    for group in groups:
        group.post_backward = partial(_take_after_backward, group, group.post_backward, take)
    try:
        yield
    finally:
        for group, method in zip(groups, replaced):
            if method is None:
                del group.post_backward
            else:
                group.post_backward = method


def _take_after_backward(
    group: Any, post_backward: Callable[..., None], take: Callable[[torch.Tensor], None], *args: Any
) -> None:
    assert not group.reduce_grads, "gradients would be reduced before they are taken"
    post_backward(*args)
    for parameter in group.fsdp_params:
        gathered: Any = getattr(parameter, "_unsharded_param", None)  # None: no forward has used it
        gradient = parameter.unsharded_accumulated_grad  # in the reduce dtype, if that is another one
        if gradient is None and gathered is not None:
            gradient = gathered.grad
        if gradient is not None:
            take(gradient)
            parameter.unsharded_accumulated_grad = gathered.grad = None


def forget_fsdp_forwards(module: torch.nn.Module) -> None:
    """Let an FSDP module forget the forwards without a backward.

    FSDP prefetches in the backward what the forward used before, by a list of all forwards since the last
    backward. The first backward after a validation would end by gathering the parameters that the
    validation used last. Nobody waits for them before the next micro-batch, and with CPU offload its first
    weights were corrupted in every second run of torch 2.11 (tests/gpu/test_ema.py)."""
    for group in _fsdp_groups(module):
        group.comm_ctx.post_forward_order.clear()
        group._post_forward_indices.clear()


def _fsdp_groups(module: torch.nn.Module) -> list[Any]:
    """The parameter groups of an FSDP module: torch 2.11 has one or None, torch 2.13 a list."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


# ---- torchrun's rendezvous


class RendezvousState(NamedTuple):
    """Where the nodes are. A round is complete when its participants have ranks; it lasts until the last
    participant leaves."""

    round: int
    is_complete: bool
    is_closed: bool
    participants: dict[Any, int]
    """The nodes of the round, with their ranks once it is complete."""
    waiting: set[Any]
    """Nodes that wait for the next round, to which the participants go when they notice."""
    spare: set[Any]
    """Nodes that wait until a round lacks a participant."""


def rendezvous_state(handler: DynamicRendezvousHandler) -> RendezvousState:
    """The state of the rendezvous, at most about a second old, without nodes that are lost. Not to be called
    during next_rendezvous(). Raises RendezvousError."""
    with handler._heartbeat_lock:
        handler._state_holder.sync()
        state = handler._state_holder.state
        return RendezvousState(
            state.round, state.complete, state.closed, dict(state.participants),
            set(state.wait_list), set(state.redundancy_list),
        )  # fmt: skip


def node_of(handler: DynamicRendezvousHandler) -> Any:
    """This node, as it is named in a RendezvousState."""
    return handler._this_node


def is_spare(handler: DynamicRendezvousHandler) -> bool:
    """Whether this node is a spare one, also while another thread is in next_rendezvous()."""
    return handler._this_node in handler._state_holder.state.redundancy_list


def leave_rendezvous(handler: DynamicRendezvousHandler, announce: bool = False) -> None:
    """Remove this node from the participants, the waiting and the spare nodes; next_rendezvous() lets it join
    again. `announce`: make it wait for the next round, so that the agents of the other nodes see that they
    have to begin one. Raises RendezvousError."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

    def leave(context: Any, deadline: float) -> _Action:
        if time.monotonic() > deadline:
            return _Action.ERROR_TIMEOUT
        if context.node in context.state.participants:
            return _Action.REMOVE_FROM_PARTICIPANTS
        if context.node in context.state.wait_list:
            return _Action.FINISH if announce else _Action.REMOVE_FROM_WAIT_LIST
        if announce and context.state.complete:
            return _Action.ADD_TO_WAIT_LIST
        if context.node in context.state.redundancy_list:
            return _Action.REMOVE_FROM_REDUNDANCY_LIST
        return _Action.FINISH

    handler._stop_heartbeats()
    handler._op_executor.run(leave, time.monotonic() + 30)


# ---- tensors


def foreach_norm(
    tensors: Sequence[torch.Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """The norm of each tensor, in few kernels. The norm of a tensor with NaN is NaN, also for `ord` =
    infinity. `dtype`: the dtype to compute in; default: the dtype of the tensors."""
    return torch._foreach_norm(list(tensors), ord, dtype=dtype)


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, in few kernels."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_lerp(targets: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], share: torch.Tensor) -> None:
    """Move each target by `share` of the way to its end, in place. `share`: scalar tensor on the same device,
    which the host does not read. A share of 0 keeps the target's values if its end is finite."""
    torch._foreach_lerp_(list(targets), list(ends), [share] * len(targets))


def fused_adamw(
    tensors: Sequence[Sequence[torch.Tensor]],
    group: Mapping[str, Any],
    found_inf: torch.Tensor | None,
    divisor: torch.Tensor | None,
) -> None:
    """A step of AdamW for many fp32 parameters, in few kernels. `tensors`: weights, gradients, first and
    second moments, and numbers of steps with this one, as plain tensors. `group`: `lr`, `betas`, `eps` and
    `weight_decay`. `found_inf`: fp32 scalar; 1: nothing changes. `divisor`: fp32 scalar by which the
    gradients are divided in place."""
    weights, gradients, moments1, moments2, steps = map(list, tensors)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        weights,
        gradients,
        moments1,
        moments2,
        [],
        steps,
        **{key: group[key] for key in ("lr", "weight_decay", "eps")},
        beta1=beta1,
        beta2=beta2,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=found_inf,
    )


_INNER = dict[type, str]()  # wrapper subclasses, and the attribute that has the tensor


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside a wrapper subclass, such as torchao's class of weights that FSDP gathers in float8.
    Other tensors are returned unchanged. Shares memory with `tensor`; a DTensor stays a DTensor. Waits for
    the device at most at the first tensor of a class."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(local):
        return tensor
    kind = type(local)
    if kind not in _INNER:  # torchao's __tensor_flatten__ reads a scale, for which the host waits
        _INNER[kind] = local.__tensor_flatten__()[0][0]
    inner = getattr(local, _INNER[kind])
    return dtensor_like(inner, tensor) if isinstance(tensor, DTensor) else inner


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether the buffer of this name is in the module's state dict."""
    return buffer not in module._non_persistent_buffers_set


def takes_grad_scaler_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step reads the tensors `found_inf` and `grad_scale` that torch.amp.GradScaler
    sets on it, as torch's fused optimizers do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


# ---- operators


def sdpa_ops() -> set[Any]:
    """The operators behind scaled_dot_product_attention."""
    names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    return {getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in names}


def matmul_ops() -> set[Any]:
    """The operators of matrix products, including float8."""
    aten = torch.ops.aten
    return {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}


def grouped_mm_ops() -> set[Any]:
    """The operators of torch.nn.functional.grouped_mm and of its form for float8."""
    return {torch.ops.aten._grouped_mm.default, torch.ops.aten._scaled_grouped_mm.default}


def scaled_grouped_mm(
    x8_RI: torch.Tensor,
    weight8_EIO: torch.Tensor,
    x_scale_R: torch.Tensor,
    weight_scale_EO: torch.Tensor,
    ends_E: torch.Tensor,
) -> torch.Tensor:
    """The grouped products [R, O] of float8 rows and float8 matrices, in bfloat16: of `x8 * x_scale` and
    `weight8 * weight_scale`. The matrices of `weight8_EIO` are column-major. Not by the public
    F.scaled_grouped_mm, whose names of recipes differ between versions of torch."""
    return torch._scaled_grouped_mm(
        x8_RI,
        weight8_EIO,
        x_scale_R,
        weight_scale_EO,
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


# ---- checkpoint files


def storage_info(file: str, offset: int, length: int) -> Any:
    """DCP's record of where a tensor is stored: `length` bytes of `file`, beginning at `offset`."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def file_prefix(plan: Any) -> str:
    """The beginning of the names of this rank's files, which DCP's writer puts into its SavePlan."""
    return plan.storage_data.prefix


def file_view(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """The bytes [offset, offset + length) of an open file, as a file object. DCP's reader passes such views
    to torch.load."""
    from torch.distributed.checkpoint.utils import _create_file_view

    return cast(IO[bytes], _create_file_view(cast(Any, file), offset, length))


# ---- compiler


class Compilation(NamedTuple):
    """One compilation by torch.compile. `function`: name of the compiled function; None for a backward and
    for code without a graph. `reason`: why the function is compiled again; empty for the first time."""

    record: Any
    function: str | None
    reason: str
    seconds: float


def compilations() -> list[Compilation]:
    """The last 64 compilations in this process; a backward is a separate item. `record` is the compiler's
    object, the same in every call. Does not import the compiler, which would take a second."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    compilations = []
    for record in dynamo.get_compilation_metrics() if dynamo is not None else []:
        function = record.co_name if record.is_forward else None
        seconds = (record.backward_cumulative_compile_time_us or 0) / 1e6
        if function:
            seconds += record.entire_frame_compile_time_s or 0.0
        compilations.append(Compilation(record, function, record.recompile_reason or "", seconds))
    return compilations


def allow_many_graphs() -> None:
    """Let torch.compile make up to 64 graphs of a function instead of 8: one for each shape, with and without
    gradients. torch keeps the setting per thread; call this function in the thread of the forwards."""
    torch.compiler.config.recompile_limit = 64


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let torch.compile make code for any size of this dim above 1, instead of this size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


DETERMINISTIC_OPTIONS: dict[str, Any] = {
    "deterministic": True,  # no timing of padded products, splits of reductions and templates
    "triton.autotune_pointwise": False,  # one block size for elementwise kernels; FMA may depend on it
}


def deterministic_options(backend: str, options: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """`options` of torch.compile; with deterministic algorithms also those that keep inductor from choosing
    kernels by their speed, which may differ between ranks and starts.

    torch.use_deterministic_algorithms sets the first of them, too. But torch 2.13 keeps settings per thread,
    and compiles backwards for CUDA in a thread of autograd, which only options reach."""
    if backend != "inductor" or not torch.are_deterministic_algorithms_enabled():
        return options
    return (options or {}) | DETERMINISTIC_OPTIONS


UPDATE_OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # without FMA
    "eager_numerics.division_rounding": True,
}


def compile_update(function: Callable[..., None], dynamic: bool | None = None) -> Callable[..., None]:
    """torch.compile for the update of a parameter, with a result that has the same bits in every process.

    By default inductor divides approximately and joins products with sums (FMA), in a way that depends on the
    block size of the kernel. It chooses the block size by timing kernels, so that a restart or a shard of
    another size could change the last bits of a weight. These options round each operation as eager code
    does. What this costs is unmeasured; a kernel of this kind mostly waits for memory."""
    options = deterministic_options("inductor", UPDATE_OPTIONS)
    return torch.compile(function, fullgraph=True, dynamic=dynamic, options=options)


def loss_compile_options(backend: str) -> dict[str, Any] | None:
    """Options of torch.compile for a loss in chunks: without inductor's online softmax, which was slower on
    an H200 (torch 2.11)."""
    return deterministic_options(backend, {"online_softmax": False} if backend == "inductor" else None)


def set_activation_memory_budget(budget: float) -> None:
    """Set the share of activations that all later compilations of this process keep for the backward."""
    from torch._functorch import config

    config.activation_memory_budget = budget
    if budget < 1 and hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        # torch 2.13 would raise an error for a DeviceMesh among the inputs, whose size it does not know.
        config.unsafe_treat_script_objects_as_zero_size = True


def count_grouped_attention() -> None:
    """Let torch 2.11 count the FLOPs of attention with fewer key heads than query heads, for the compiler's
    memory budget. torch 2.13 counts them itself; the counts are the same."""
    from torch.utils import flop_counter

    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        count = getattr(flop_counter, name)
        if not isinstance(count, partial):
            setattr(flop_counter, name, partial(_with_all_heads, count))


def _with_all_heads(count: Callable[..., int], *shapes: Sequence[int]) -> int:
    """`count` of shapes [B, heads, T, E], with as many key and value heads as query heads."""
    heads = max(shape[1] for shape in shapes)
    return count(*((shape[0], heads, *shape[2:]) for shape in shapes))


def enable_async_tensor_parallel(mesh: DeviceMesh) -> dict[str, Any]:
    """Options of torch.compile with which inductor splits a matrix product after an all-gather over `mesh`,
    or before a reduce-scatter, into chunks that are exchanged through symmetric memory. Call this before the
    first compilation: it enables symmetric memory for the ranks of `mesh`, for which the compiler looks,
    although torch says that this is not needed any more."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
    return {"_micro_pipeline_tp": True}


def recompute_float8_copies() -> dict[str, Any]:
    """Options of torch.compile with which inductor makes transposed copies of 8-bit weights in the backward.
    Only the backward needs them, but by default the forward makes them and keeps them until then."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class RecomputeCopies(CustomGraphPass):
        """Marks values that are computed only from 8-bit inputs of a graph, which are weights, to be
        recomputed, as activation checkpointing does."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            from_weights = set[torch.fx.Node]()
            for node in graph.nodes:
                value = node.meta.get("val")
                if not isinstance(value, torch.Tensor) or value.dtype != torch.float8_e4m3fn:
                    continue
                if node.op == "placeholder":
                    from_weights.add(node)
                elif node.all_input_nodes and from_weights.issuperset(node.all_input_nodes):
                    from_weights.add(node)
                    node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
                    node.meta.setdefault("ac_graph_id", 0)

        def uuid(self) -> str:
            # Constant, because the key of compiled code has the bytes of this module: compile_cache.py.
            return "titanlite: recompute copies of 8-bit weights"

    return {"joint_custom_post_pass": RecomputeCopies()}


# ---- float8


def float8_input_cast(linear: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that casts inputs of the Float8Linear `linear` to float8."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    return partial(
        hp_tensor_to_float8_dynamic,
        float8_dtype=torch.float8_e4m3fn,
        linear_mm_config=linear.linear_mm_config,
        gemm_input_role=GemmInputRole.INPUT,
    )


def float8_rowwise_parallel() -> Any:
    """torchao's subclass of RowwiseParallel that sends gradients in float8."""
    from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel

    return Float8RowwiseParallel


def is_float8_linear(layer: torch.nn.Module) -> bool:
    """Whether torchao computes this linear layer in float8."""
    from torchao.float8.float8_linear import Float8Linear

    return isinstance(layer, Float8Linear)


# ---- attention


def sdp_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> int:
    """The SDPBackend that scaled_dot_product_attention chooses for [B, heads, T, E]; causal if `mask` is
    None. Raises RuntimeError if no enabled kernel takes these tensors."""
    gqa = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, flash: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its log-sum-exps, for [B, H, T, E]: [B, H, T, E], and fp32 with B * H * T elements. On
    CUDA by cuDNN, or with `flash` by the flash kernel; by torch's flash kernel on CPU, which needs as many
    key heads as query heads."""
    if not q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif flash:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = cudnn(q, k, v, None, True, 0.0, causal, False)
    return out, lse


def attention_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    flash: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for the kernels of attention_with_lse. `lse`: [B, H, T, 1]."""
    q, k, v = inputs
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.squeeze(-1), 0.0, causal
        )
    dropout_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # not used: dropout is 0
    if flash:
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.squeeze(-1), None, None, q.shape[2], k.shape[2], 0.0, causal,
            dropout_seed, dropout_seed,
        )  # fmt: skip
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, dropout_seed, dropout_seed, None, None, None, q.shape[2], k.shape[2],
        0.0, causal,
    )  # fmt: skip


def load_varlen_attention() -> Callable[..., torch.Tensor] | None:
    """torch's causal attention within documents: a function of q, k, v [tokens, heads, E], cu_seqlens,
    max_seqlen and the sliding window in tokens, 0 for none. None if this torch lacks the kernel.

    torch 2.13 takes fewer key heads than query heads only with `enable_gqa`, which torch 2.11 does not have.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # not on every platform
        return None
    takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        window: int = 0,
    ) -> torch.Tensor:
        # The numbers of earlier and later tokens that a token sees; -1: no limit.
        options: dict[str, Any] = {"window_size": (window - 1, 0)}
        if takes_gqa and q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        out: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        return out

    return attend


def use_flash_attention_4(on: bool) -> None:
    """Let scaled_dot_product_attention and varlen attention use the flash kernels of the package
    flash-attn-4, in this whole process, or torch's own again. Raises ImportError or RuntimeError if the
    installed package does not fit this torch."""
    if on == (torch.nn.attention.current_flash_attention_impl() == "FA4"):
        return
    if on:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    else:
        torch.nn.attention.restore_flash_attention_impl()


def flash_attention_4_can_be_deterministic() -> bool:
    """Whether this torch asks FlashAttention 4 for deterministic gradients where it has been told to use
    deterministic algorithms."""
    from torch.nn.attention import _fa4

    return "deterministic" in inspect.signature(_fa4._fa4_run_backward).parameters


# ---- CUDA


def record_memory_history(max_entries: int | None) -> None:
    """Record allocations of CUDA memory with stack traces, at most `max_entries`. None: stop recording."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(file: str | Path) -> None:
    """Write the recorded allocations to `file`, a pickle for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(file))
