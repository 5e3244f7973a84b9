"""What FSDP does with its modules."""

from __future__ import annotations

from torch import nn

from titanlite.torch_compat import _fsdp_groups


def reshards_after_forward(module: nn.Module) -> bool:
    """Whether an FSDP module frees its gathered parameters after the forward."""
    return all(group.post_forward_mesh_info is not None for group in _fsdp_groups(module))
