"""Private and version-dependent APIs of torch and torchao for compiled and sharded blocks. Each function has
a test in tests/unit/parallel/test_torch_compat.py, which fails when torch or torchao changes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy


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
        """Marks what is computed from 8-bit inputs of a graph alone, which are weights, as activation
        checkpointing marks what is to be recomputed."""

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

        def uuid(
            self,
        ) -> str:  # the key of compiled code has the bytes of this module: runtime/compile_cache.py
            return "titanlite: recompute copies of 8-bit weights"

    return {"joint_custom_post_pass": RecomputeCopies()}


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
