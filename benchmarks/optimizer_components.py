"""Optimizers of other packages as components, and the size of an optimizer's state, for optimizer_steps.py.

Loaded with `--job.imports=["benchmarks.optimizer_components"]`. If the environment variable STATE_BYTES_FILE
names a file, rank 0 writes the bytes of state per parameter to it after the first optimizer step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer


class Both(torch.optim.Optimizer):
    """Two optimizers, of different parameters, as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer):
        # The groups are shared, so that a new learning rate reaches the optimizer that has the group.
        super().__init__([*first.param_groups, *second.param_groups], {})
        self.parts = first, second

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
            self.state.update(part.state)


@dataclass(frozen=True, kw_only=True)
class TorchMuon(Optimizer, name="torch_muon"):
    """torch.optim.Muon for the matrices of the blocks, and fused AdamW for all other parameters."""

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        matrices = {p for name, p in model.named_parameters() if model.parameter_role(name) == "matrix"}
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in self.groups(model):
            for is_matrix in groups:
                params = [p for p in group["params"] if (p in matrices) == is_matrix]
                if params:
                    groups[is_matrix].append({**group, "params": params})
        muon = torch.optim.Muon(groups[True], lr=self.lr, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(groups[False], lr=self.lr, betas=(0.9, 0.95), fused=True)
        return Both(muon, adamw)


@dataclass(frozen=True, kw_only=True)
class TorchaoAdamW8bit(Optimizer, name="torchao_adamw8bit"):
    """torchao's AdamW with 8-bit state."""

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit

        # It makes a tensor of each group's learning rate and wants it to stay one: peak_lr is that tensor.
        return AdamW8bit(self.groups(model), lr=self.lr, betas=(0.9, 0.95))


def write_state_bytes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Write this rank's bytes of state per parameter to STATE_BYTES_FILE, after an optimizer's first step. An
    optimizer that consists of others ends its step after theirs, so that its number stays."""
    if optimizer not in measured:
        measured.append(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        total = sum(num_bytes(value) for state in optimizer.state.values() for value in state.values())
        # Parameters are in fp32.
        Path(FILE).write_text(str(total / sum(num_bytes(p) / 4 for p in parameters)))


def num_bytes(tensor: Any) -> int:
    """Bytes of the plain tensors that a tensor consists of on this rank."""
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor, torchao's quantised tensors
        return sum(num_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else 0


measured: list[torch.optim.Optimizer] = []
FILE = os.environ.get("STATE_BYTES_FILE", "")
if FILE and os.environ.get("RANK", "0") == "0":
    register_optimizer_step_post_hook(write_state_bytes)
