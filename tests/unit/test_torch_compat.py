"""Pins what titanlite relies on in torch's private names: a test for each function of torch_compat.py. One
that fails with a new version of torch tells which function has to learn it."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend

from tests.support.fsdp import reshards_after_forward
from tests.support.tiers import full
from titanlite import torch_compat
from titanlite.parallel.fsdp import reshard
from titanlite.runtime import process


def wait_for_a_rank_that_does_not_come(seconds: float) -> float:
    """How long an all-reduce waits whose group was given a new timeout."""
    torch_compat.set_group_timeout(None, timedelta(seconds=seconds))
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
    return time.monotonic() - began


def test_a_group_gets_a_new_timeout(run_on: Any) -> None:
    waited = run_on(2, wait_for_a_rank_that_does_not_come, 0.5)[0]
    assert 0.4 < waited < 60  # the timeout of the group before is half an hour


def exchanged_shards() -> tuple[list[float], list[float]]:
    rank, gathered, reduced = float(dist.get_rank()), torch.zeros(4), torch.zeros(2)
    torch_compat.gather_shards(gathered, torch.tensor([rank, rank + 0.5]))
    torch_compat.reduce_shards(reduced, torch.arange(4.0) + rank)
    return gathered.tolist(), reduced.tolist()


def test_shards_are_gathered_and_reduced(run_on: Any) -> None:
    gathered = [0.0, 0.5, 1.0, 1.5]
    assert run_on(2, exchanged_shards) == [(gathered, [1.0, 3.0]), (gathered, [5.0, 7.0])]


def gloo_records() -> list[tuple[str, int, bool]]:
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    record = json.loads(torch_compat.gloo_flight_record() or "{}")
    return [(e["profiling_name"], e["collective_seq_id"], e["is_p2p"]) for e in record["entries"]][-2:]


def test_gloo_records_its_collectives(run_on: Any) -> None:
    expected = [("gloo:all_reduce", 1, False), ("gloo:all_reduce", 2, False)]
    assert run_on(2, gloo_records) == [expected] * 2


def flat_size() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch_compat.flatten_mesh(mesh["a", "b"], "all")
    return [mesh["all"].size(), mesh["all"].get_local_rank()]


def test_dimensions_of_a_mesh_are_flattened(run_on: Any) -> None:
    assert run_on(4, flat_size) == [[4, rank] for rank in range(4)]


def shards() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    again = torch_compat.dtensor_like(tensor.to_local() + 1, tensor)
    sums = torch_compat.dtensor_like(tensor.to_local().sum(1, keepdim=True).int(), tensor, torch.Size([5, 1]))
    return {
        "offsets": torch_compat.local_offsets(tensor),
        "global": again.full_tensor().flatten().tolist(),
        "sums": (sums.full_tensor().flatten().tolist(), sums.shape, sums.dtype, sums.stride()),
        "placements": again.placements == tensor.placements,
        "grad": again.requires_grad,
    }


def test_a_dtensor_is_made_of_a_local_shard_and_knows_where_it_begins(run_on: Any) -> None:
    sums = ([1, 5, 9, 13, 17], (5, 1), torch.int32, (1, 1))
    expected = {"global": [float(i) for i in range(1, 11)], "sums": sums, "placements": True, "grad": False}
    assert run_on(2, shards) == [{"offsets": (offset, 0), **expected} for offset in (0, 3)]


def test_norms_of_many_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, math.nan]), torch.tensor([-math.inf])]
    assert torch_compat.foreach_norm(tensors)[0].item() == 5
    largest = [norm.item() for norm in torch_compat.foreach_norm(tensors, math.inf)]
    assert largest[0] == 4
    assert math.isnan(largest[1])
    assert math.isinf(largest[2])


def test_the_tensor_inside_a_wrapper_is_found_without_waiting_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    read = list[torch.Tensor]()

    class Scale(torch.Tensor):
        def __bool__(self) -> bool:
            read.append(self)
            return True

    scale, inner = torch.ones(()).as_subclass(Scale), torch.ones(2, 2)
    wrapped = WeightWithDynamicFloat8CastTensor(inner, LinearMMConfig(), torch.float8_e4m3fn, scale)
    monkeypatch.setattr(torch_compat, "_INNER", {})
    for _ in range(3):
        assert torch_compat.plain_tensor(wrapped) is inner
        assert len(read) == 1, "only for the first tensor of the class"
    assert torch_compat.plain_tensor(inner) is inner


def test_a_view_of_a_file_and_its_record(tmp_path: Path) -> None:
    file = tmp_path / "shards"
    stored = io.BytesIO()
    torch.save(torch.arange(3), stored)
    file.write_bytes(b"before" + stored.getvalue() + b"after")
    info = torch_compat.storage_info("shards", 6, len(stored.getvalue()))
    assert (info.relative_path, info.offset, info.length) == ("shards", 6, len(stored.getvalue()))
    with open(file, "rb") as f:
        view = torch_compat.file_view(f, info.offset, info.length)
        assert torch.load(view, weights_only=True).tolist() == [0, 1, 2]


def test_the_names_of_dcps_files(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([SavePlan([])])
    assert torch_compat.file_prefix(plan) == "__0_"


def test_the_compilers_records() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    before = len(torch_compat.compilations())
    compiled = torch.compile(double, backend="aot_eager", dynamic=False)
    compiled(torch.ones(2))
    first = torch_compat.compilations()
    assert len(first) > before or before == 64  # the number of records that dynamo keeps
    assert (first[-1].function, first[-1].reason) == ("double", "")
    assert 0 < first[-1].seconds < 600
    again = torch_compat.compilations()[-1]
    assert again.record is first[-1].record, "Compilations tells records apart by identity"
    compiled(torch.ones(2, requires_grad=True)).sum().backward()
    *_, forward, backward = torch_compat.compilations()
    assert forward.function == "double"
    assert "requires_grad" in forward.reason
    assert backward.function is None
    assert 0 < backward.seconds < 600


@pytest.mark.full
def test_many_graphs_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._dynamo.testing import CompileCounter

    def graphs_for(sizes: range) -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        double = torch.compile(lambda x: 2 * x, fullgraph=True, dynamic=False, backend=counter)
        for size in sizes:
            double(torch.ones(size))
        return counter.frame_count

    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 8)
    with pytest.raises(FailOnRecompileLimitHit):
        graphs_for(range(2, 22))
    torch_compat.allow_many_graphs()
    assert graphs_for(range(2, 22)) == 20


def test_code_for_any_size_of_a_dim() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    double = torch.compile(lambda x: 2 * x, backend=counter)
    for rows in (4, 5, 9):
        x = torch.ones(rows, 8)
        torch_compat.mark_dynamic(x, 0)
        double(x)
    assert counter.frame_count == 1
    double(torch.ones(4, 9))  # the other dim keeps its size
    assert counter.frame_count == 2


def test_the_option_of_the_compiled_loss_exists() -> None:
    assert torch_compat.loss_compile_options("aot_eager") is None
    options = torch_compat.loss_compile_options("inductor")
    assert options is not None
    assert options.keys() <= set(torch._inductor.list_options())


def test_the_options_of_a_compiled_update_exist() -> None:
    """tests/gpu/test_low_bit.py shows what they do."""
    assert torch_compat.UPDATE_OPTIONS.keys() <= set(torch._inductor.list_options())
    assert torch_compat.compile_update(lambda x: None) is not None


def test_deterministic_algorithms_include_those_of_the_compiler() -> None:
    """torch sets inductor's choice together with its own. Without it, the user's choice stays."""
    from torch._inductor import config

    before = config.deterministic
    with process.determinism(True):
        assert config.deterministic is True
        assert torch.are_deterministic_algorithms_enabled()
    with process.determinism(False):
        assert config.deterministic is before
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_compiled_backward_is_deterministic_in_any_thread() -> None:
    """On CUDA it is compiled in a thread of autograd, where settings of the main thread may not hold."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx, config

    assert torch_compat.DETERMINISTIC_OPTIONS.keys() <= set(torch._inductor.list_options())
    seen = list[bool]()

    def look(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.append(config.deterministic and not config.triton.autotune_pointwise)
        return make_boxed_func(graph.forward)

    def compiled(options: dict[str, Any] | None) -> list[bool]:
        torch._dynamo.reset()
        seen.clear()
        options = {**(options or {}), "fx_graph_cache": False}
        double = torch.compile(lambda x: (2 * x).sin(), options=options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compile_fx, "_compile_fx_inner", look)
            loss = double(torch.ones(8, requires_grad=True)).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        return list(seen)

    with process.determinism(True):
        assert compiled(torch_compat.deterministic_options("inductor")) == [True, True]
        assert compiled(None) == [False, False], "control"
    assert torch_compat.deterministic_options("inductor") is None
    with process.determinism(True):
        assert torch_compat.deterministic_options("aot_eager") is None


def test_persistent_buffers() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("recomputed", torch.zeros(1), persistent=False)
    names = [name for name, _ in module.named_buffers()]
    assert [name for name in names if torch_compat.is_persistent(module, name)] == list(module.state_dict())
    assert list(module.state_dict()) == ["kept"]


def accumulated(fold: bool) -> str:
    """The dtype in which FSDP keeps a gradient after a backward without gradient synchronisation."""
    net = nn.Linear(4, 4, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    net.set_requires_gradient_sync(False)
    hidden = net(torch.ones(2, 4, dtype=torch.bfloat16))
    net.set_is_last_backward(False)
    (weight,) = net.parameters()
    gradient = torch.autograd.grad(hidden.sum(), [weight])[0]
    assert not isinstance(weight, DTensor)  # gathered
    weight.grad = gradient
    if fold:
        torch_compat.finish_weight_backward(net)
    state = net._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    kept = groups[0].fsdp_params[0].unsharded_accumulated_grad
    return str(weight.grad.dtype if kept is None else kept.dtype)


@pytest.mark.parametrize(("fold", "dtype"), [(True, "torch.float32"), (False, "torch.bfloat16")])
def test_gradients_of_a_weight_backward_are_kept_in_the_reduce_dtype(
    run_on: Any, fold: bool, dtype: str
) -> None:
    assert run_on(2, accumulated, fold) == [dtype, dtype]


@pytest.mark.parametrize("reshard", [True, False])
def test_whether_fsdp_frees_gathered_parameters(reshard: bool) -> None:
    with torch_compat.fake_process_group(0, 2):
        net = nn.Linear(4, 4)
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)
        assert reshards_after_forward(net) == reshard


def gathered(module: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The names of the FSDP modules whose parameters FSDP begins to gather in `run()`."""
    names = list[str]()
    (group,) = torch_compat._fsdp_groups(module)
    unshard = type(group).unshard

    def noted(self: Any, async_op: bool = False) -> None:
        before = self._all_gather_result
        unshard(self, async_op)
        if self._all_gather_result is not before:
            names.append(self._module_fqn)

    with patch.object(type(group), "unshard", noted):
        run()
    return names


@pytest.mark.parametrize("forgets", [True, False])
def test_the_backward_after_a_forward_alone_gathers_what_it_needs(forgets: bool) -> None:
    def forward() -> torch.Tensor:
        return net(torch.ones(2, 4)).sum()

    with torch_compat.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        net = nn.Sequential(*(fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(3)))
        fully_shard(net, mesh=mesh)
        expected = gathered(net[0], lambda: forward().backward())
        with torch.no_grad():
            forward()
        if forgets:
            reshard(net)
        after = gathered(net[0], lambda: forward().backward())
    assert expected[:3] == ["0", "1", "2"]
    assert after == expected + ([] if forgets else ["2"])


def streams_of_reductions(reduce_dtype: torch.dtype | None = None) -> list[list[str]]:
    """For the first backward and for a second one that adds to its gradients: the streams of computation on
    which FSDP allocates the input and the result of its reduction, and those for which it waits then."""
    streams = list[str]()

    class Stream:
        def __init__(self, name: str):
            streams.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *args: Any) -> None: ...

    class Current:
        def wait_stream(self, stream: str) -> None:
            streams.append(f"waits for {stream}")

    net = nn.Linear(4, 4)
    fully_shard(
        net, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    )
    torch_compat.reduce_fsdp_in_computation_memory(net)
    backwards = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "default_stream", lambda device: "default")
        patch.setattr(torch.cuda, "current_stream", lambda device: Current())
        patch.setattr(torch.cuda, "stream", Stream)
        for _ in range(2):
            streams.clear()
            net(torch.ones(2, 4)).sum().backward()
            backwards.append([*streams])
    assert torch.equal(
        net.weight.grad.to_local(), torch.full((2, 4), 4.0)
    )  # the mean of two equal ranks, twice
    return backwards


def test_fsdp_reduces_gradients_in_the_memory_of_the_computation(run_on: Any) -> None:
    default = ["default", "waits for default"] * 2
    assert run_on(2, streams_of_reductions) == [[default, []]] * 2
    # A result in another dtype is cast, and does not become the gradient.
    assert run_on(2, streams_of_reductions, torch.bfloat16) == [[[], []]] * 2


def calls_of_fsdp_waits(accumulate: bool) -> Counter[str]:
    calls = Counter[str]()

    def counted(method: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[method.__name__] += 1
            return method(*args)

        return call

    net = torch.nn.Linear(4, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    torch_compat.time_fsdp_waits(net, counted, on_cuda=False)
    net.set_requires_gradient_sync(not accumulate)
    net(torch.ones(2, 4)).sum().backward()
    assert (net.weight.grad is None) == accumulate
    return calls


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_methods_in_which_fsdp_waits(run_on: Any, accumulate: bool) -> None:
    for calls in run_on(2, calls_of_fsdp_waits, accumulate):
        assert calls["unshard"] > 0
        assert calls["wait_for_unshard"] > 0
        assert calls["finalize_backward"] == 1
        assert calls["post_backward"] == (0 if accumulate else 1)


def local_gradients(reduce_dtype: torch.dtype, timed: bool) -> Any:
    """The gradients that are taken on one rank, whose loss has its rank's number as a factor; what is left of
    them; and the reduced gradient of a later backward."""
    net, taken = torch.nn.Linear(4, 1, bias=False), list[torch.Tensor]()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    if timed:
        torch_compat.time_fsdp_waits(net, lambda method: method, on_cuda=False)
    x = torch.full((1, 4), float(dist.get_rank() + 1), dtype=torch.bfloat16)
    net.set_requires_gradient_sync(False)
    with torch_compat.take_local_gradients(net, taken.append):
        net(x).sum().backward()
    net.set_requires_gradient_sync(True)
    left = net.weight.grad
    net(x).sum().backward()
    return (
        [(t.tolist(), str(t.dtype)) for t in taken],
        left,
        net.weight.grad.full_tensor().tolist(),
        len(taken),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("timed", [False, True])
def test_gradients_are_taken_before_they_are_reduced(run_on: Any, dtype: torch.dtype, timed: bool) -> None:
    wanted = [([([[float(rank)] * 4], str(dtype))], None, [[1.5] * 4], 1) for rank in (1, 2)]
    assert run_on(2, local_gradients, dtype, timed) == wanted


def reduce_and_gather() -> list[Any]:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    largest = torch_compat.all_reduce(torch.tensor([rank, -rank]), "max", mesh).tolist()
    x = torch.full((1, 2), float(rank + 1), requires_grad=True)
    whole = torch_compat.all_gather_with_gradient(x, 1, mesh.get_group())
    (whole * (rank + 1)).sum().backward()
    assert x.grad is not None
    return [largest, whole.tolist(), x.grad.tolist()]


def test_collectives_that_the_compiler_traces(run_on: Any) -> None:
    expected = [[1, 0], [[1.0, 1.0, 2.0, 2.0]], [[3.0, 3.0]]]  # a gradient of 1 from rank 0, of 2 from rank 1
    assert run_on(2, reduce_and_gather) == [expected, expected]


def weight_backwards() -> list[str]:
    """The calls when one of two pipeline stages runs a backward of its weights."""
    from torch.distributed.pipelining import PipelineStage

    x, calls = torch.empty(1, 1), list[str]()
    assert callable(PipelineStage.backward_weight_one_chunk)  # the name that torch's schedules call

    class Stage(PipelineStage):
        def backward_weight_one_chunk(self, *_: Any, **__: Any) -> None:
            calls.append("weights")

    stage = Stage(nn.Linear(1, 1), dist.get_rank(), 2, torch.device("cpu"), (x,), (x,))
    torch_compat.after_weight_backward(stage, lambda: calls.append("after"))
    stage.backward_weight_one_chunk(0, last_backward=True)
    return calls


def test_a_hook_runs_after_the_backward_of_weights(run_on: Any) -> None:
    """tests/distributed/test_pipeline.py compares the gradients that depend on it."""
    assert run_on(2, weight_backwards) == [["weights", "after"]] * 2


def test_several_tensors_are_copied() -> None:
    targets, sources = [torch.zeros(()), torch.zeros(3)], [torch.ones(()), torch.arange(3.0)]
    torch_compat.foreach_copy(targets, sources)
    assert [target.tolist() for target in targets] == [1.0, [0.0, 1.0, 2.0]]


def test_several_tensors_are_moved_towards_their_ends_by_a_share_on_the_device() -> None:
    targets, ends = [torch.zeros(()), torch.zeros(2, 2)], [torch.ones(()), torch.full((2, 2), 4.0)]
    torch_compat.foreach_lerp(targets, ends, torch.tensor(0.25))
    assert [target.tolist() for target in targets] == [0.25, [[1.0, 1.0], [1.0, 1.0]]]
    torch_compat.foreach_lerp(targets, ends, torch.tensor(0.0))
    assert [target.tolist() for target in targets] == [0.25, [[1.0, 1.0], [1.0, 1.0]]]


def test_many_parameters_take_a_step_of_adamw() -> None:
    """With gradients divided by 4, and skipped where found_inf is 1."""
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    columns = [[torch.full((2,), x)] for x in (1.0, 8.0, 0.0, 0.0)]
    tensors = [*columns, [torch.ones(())]]
    torch_compat.fused_adamw(tensors, group, torch.ones(()), torch.tensor(4.0))
    assert [column[0][0].item() for column in (columns[0], columns[2])] == [1.0, 0.0]
    columns[1][0].fill_(8.0)
    torch_compat.fused_adamw(tensors, group, torch.zeros(()), torch.tensor(4.0))
    values = [column[0][0].item() for column in columns]
    assert values == pytest.approx([0.9, 2.0, 0.2, 0.2])


def test_optimizers_that_read_the_tensors_of_a_grad_scaler() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    fused = torch.optim.AdamW(weight, fused=True)
    assert torch_compat.takes_grad_scaler_tensors(fused)
    assert not torch_compat.takes_grad_scaler_tensors(torch.optim.AdamW(weight, fused=False))
    weight[0].grad = torch.ones(2)
    fused.grad_scale, fused.found_inf = torch.tensor(2.0), torch.tensor(1.0)  # type: ignore[attr-defined]
    fused.step()
    assert weight[0].tolist() == [1.0, 1.0]  # the step was skipped
    fused.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    fused.step()
    assert weight[0].tolist() != [1.0, 1.0]


def test_operators_that_activation_checkpointing_keeps() -> None:
    """torch reports these operators when attention and matrix products run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(1, 2, 4, 8)
    with Watch():
        nn.functional.scaled_dot_product_attention(x, x, x)
        x[0, 0] @ x[0, 0].T
        ends = torch.tensor([1, 4], dtype=torch.int32)
        nn.functional.grouped_mm(x[0, 0].bfloat16(), torch.randn(2, 8, 8).bfloat16(), offs=ends)
    assert seen & torch_compat.grouped_mm_ops()
    assert seen & torch_compat.sdpa_ops()
    assert seen & torch_compat.matmul_ops()


def test_the_grouped_product_in_float8_has_the_arguments_that_are_passed() -> None:
    """It runs on GPUs only (tests/gpu/test_moe.py)."""
    names = [argument.name for argument in torch.ops.aten._scaled_grouped_mm.default._schema.arguments]
    assert names[:5] == ["self", "mat2", "scale_a", "scale_b", "offs"]
    assert {"out_dtype", "use_fast_accum"} <= set(names)
    assert torch.ops.aten._scaled_grouped_mm.default in torch_compat.grouped_mm_ops()


def test_a_fake_process_group_exchanges_nothing() -> None:
    for rank in (0, 4099):
        with torch_compat.fake_process_group(rank, 4100):
            assert (dist.get_rank(), dist.get_world_size()) == (rank, 4100)
            mesh = init_device_mesh("cpu", (1025, 4), mesh_dim_names=("a", "b"))
            assert tuple(mesh.get_coordinate() or ()) == divmod(rank, 4)
            value = torch.ones(3)
            dist.all_reduce(value, group=mesh["b"].get_group())
            assert value.tolist() == [1.0] * 3
        assert not dist.is_initialized()


def test_the_compilers_memory_budget() -> None:
    from torch._functorch import config

    try:
        torch_compat.set_activation_memory_budget(0.5)
        assert config.activation_memory_budget == 0.5
    finally:
        torch_compat.set_activation_memory_budget(1.0)


def test_flops_of_grouped_attention_are_those_of_repeated_heads() -> None:
    from torch.utils import flop_counter

    torch_compat.count_grouped_attention()
    torch_compat.count_grouped_attention()  # the second call changes nothing
    queries, keys = (1, 8, 16, 32), (1, 2, 16, 32)
    assert flop_counter.sdpa_flop_count(queries, keys, keys) == 2 * 2 * 8 * 16 * 16 * 32


@pytest.mark.gpu
def test_the_memory_history_of_a_gpu(tmp_path: Path) -> None:
    torch_compat.record_memory_history(100)
    torch.empty(1 << 20, device="cuda")
    torch_compat.dump_memory_history(tmp_path / "memory.pickle")
    torch_compat.record_memory_history(None)
    assert (tmp_path / "memory.pickle").stat().st_size > 0


# ---- attention


def test_varlen_attention_takes_the_arguments_that_are_passed() -> None:
    """The kernel runs on CUDA only; FakeTensorMode runs all of its Python code."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    attend = torch_compat.load_varlen_attention()
    assert attend is not None
    with FakeTensorMode():
        q, k = (torch.empty(12, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        assert attend(q, k, k, cu_seqlens, 8).shape == (12, 4, 16)
        assert attend(q, q, q, cu_seqlens, 8).shape == (12, 4, 16)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_log_sum_exps_and_its_backward(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 8, 16, generator=generator) for _ in range(4))
    out, lse = torch_compat.attention_with_lse(q, k, v, causal)
    scores = q @ k.transpose(-1, -2) / 4
    if causal:
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(lse.reshape(2, 3, 8), scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    for x in (q, k, v):
        x.requires_grad_()
    nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(grad)
    lse = lse.reshape(2, 3, 8, 1)
    ours = torch_compat.attention_backward(grad, (q.detach(), k.detach(), v.detach()), out, lse, causal)
    for x, gradient in zip((q, k, v), ours):
        torch.testing.assert_close(gradient, x.grad)


@pytest.mark.gpu
def test_the_sdp_choice_of_a_gpu() -> None:
    q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    assert SDPBackend(torch_compat.sdp_choice(q, k, k, None)) != SDPBackend.ERROR


def test_flash_attention_4_takes_the_place_of_the_flash_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    attention: Any = torch.nn.attention
    assert "FA4" in attention.list_flash_attention_impls()

    def fails() -> None:
        raise ImportError

    with monkeypatch.context() as patch:
        patch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA4", fails)
        with pytest.raises(ImportError):
            torch_compat.use_flash_attention_4(True)
    assert attention.current_flash_attention_impl() is None

    class Handle:
        def remove(self) -> None:
            calls.append("removed")

    def register() -> Handle:
        calls.append("registered")
        return Handle()

    calls = list[str]()
    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA4", register)
    for on in (False, True, True, False, False):
        torch_compat.use_flash_attention_4(on)
        assert (attention.current_flash_attention_impl() == "FA4") == on
    assert calls == ["registered", "removed"]


def test_torch_asks_flash_attention_4_for_deterministic_gradients() -> None:
    """If not, runs with training.deterministic refuse the package."""
    assert torch_compat.flash_attention_4_can_be_deterministic()


# ---- compiled and sharded blocks


@pytest.mark.parametrize("device", [full("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_of_8_bit_weights_are_made_in_the_backward(device: str) -> None:
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    layer = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64, bias=False)))[0]
    weight = hp_tensor_to_float8_dynamic(
        layer.weight.detach().to(device, torch.bfloat16),
        torch.float8_e4m3fn,
        layer.linear_mm_config,
        gemm_input_role=GemmInputRole.WEIGHT,
    ).requires_grad_()
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device, requires_grad=True)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        args = x, weight.t(), layer.linear_mm_config, layer.config
        return nn.functional.silu(matmul_with_hp_or_float8_args.apply(*args))

    def run(options: dict[str, Any] | None) -> tuple[set[int], list[torch.Tensor]]:
        """The storages of 8-bit weights that the forward keeps, and the gradients."""
        torch._dynamo.reset()
        y = torch.compile(forward, fullgraph=True, options=options)(x, weight)
        saved: Any = y.grad_fn.saved_tensors
        kept = {
            t.untyped_storage().data_ptr()
            for t in saved
            if t.shape == (64, 64) and t.dtype == torch.float8_e4m3fn
        }
        return kept, list(torch.autograd.grad(y.sum(), [x, weight]))

    copies, expected = run(None)
    kept, actual = run(torch_compat.recompute_float8_copies())
    own = {weight._data.untyped_storage().data_ptr()}
    assert len(copies) == 1
    assert not copies & own
    assert kept == own
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


class Compiled(Exception):
    """The compiler has generated code: its argument."""


def test_products_beside_collectives_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def keep(code: str) -> None:
        raise Compiled(code)  # the operators have no CPU kernel

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(keep))
    monkeypatch.setattr(config, "force_disable_caches", True)

    def code(fn: Any, options: dict[str, Any] | None) -> str:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="def call") as raised:
            torch.compile(fn, fullgraph=True, options=options)(torch.ones(512, 512), torch.ones(512, 512))
        return str(raised.value)

    with torch_compat.fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        name = mesh.get_group().group_name
        split = torch_compat.enable_async_tensor_parallel(mesh)
        for operator, fn in (
            ("fused_all_gather_matmul", lambda x, w: funcol.all_gather_tensor(x, 0, name) @ w),
            ("fused_matmul_reduce_scatter", lambda x, w: funcol.reduce_scatter_tensor(x @ w, "sum", 0, name)),
        ):
            assert operator in code(fn, split)
            assert operator not in code(fn, None)


def test_float8_layers_of_torchao() -> None:
    float8 = pytest.importorskip("torchao.float8")
    net = nn.Sequential(nn.Linear(16, 16, bias=False))
    assert not torch_compat.is_float8_linear(net[0])
    float8.convert_to_float8_training(net, config=float8.Float8LinearConfig(emulate=True))
    assert torch_compat.is_float8_linear(net[0])
    values = torch.randn(16, 16)
    cast = torch_compat.float8_input_cast(net[0])(values)
    torch.testing.assert_close(cast.to_original_precision(), values, rtol=0.07, atol=0.01)
    style = torch_compat.float8_rowwise_parallel()
    assert issubclass(style, torch.distributed.tensor.parallel.RowwiseParallel)


@pytest.mark.full  # torch waits a second between two looks
def test_nodes_join_wait_and_leave() -> None:
    """Two nodes of one process, of which a round takes one: the other one is spare, and takes the place of
    the first when that one leaves."""
    store = dist.TCPStore("localhost", 0, is_master=True)
    parameters = RendezvousParameters("c10d", "", "run", 1, 1)
    first, second = (create_handler(store, C10dRendezvousBackend(store, "run"), parameters) for _ in range(2))
    assert first.next_rendezvous().world_size == 1
    joining = threading.Thread(target=second.next_rendezvous, daemon=True)
    joining.start()
    until = time.monotonic() + 60
    while not torch_compat.is_spare(second):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not torch_compat.is_spare(first)
    time.sleep(1.1)  # the state of the first node is at most this old
    state = torch_compat.rendezvous_state(first)
    nodes = [torch_compat.node_of(handler) for handler in (first, second)]
    assert (state.participants, state.spare) == ({nodes[0]: 0}, {nodes[1]})
    assert (state.waiting, state.is_complete, state.is_closed) == (set(), True, False)
    torch_compat.leave_rendezvous(first)
    joining.join(60)
    later = torch_compat.rendezvous_state(second)
    assert (later.participants, later.spare, later.is_complete) == ({nodes[1]: 0}, set(), True)
    assert later.round == state.round + 1
    assert second.shutdown()
    assert torch_compat.rendezvous_state(second).is_closed
