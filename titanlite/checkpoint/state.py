"""What a checkpoint holds: all that cannot be recomputed, under names that do not depend on the layout.

Tensors go through torch DCP, which reshards them; the rest is a few numbers in train.json. The learning rate,
the data order and the schedule are functions of these and are not stored, so a changed one is never
overwritten by a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.checkpoint.commit import CheckpointError


@dataclass
class TrainState:
    """The small state. `rows`: rows of the run's order consumed. `tokens`: targets counted, int64 on the
    device."""

    step: int
    rows: int
    tokens: torch.Tensor

    def as_json(self) -> dict[str, int]:
        """Plain numbers; reads the device."""
        return {"step": self.step, "rows": self.rows, "tokens": int(self.tokens)}

    def restore(self, values: dict[str, Any]) -> None:
        """Take the numbers of a train.json."""
        self.step, self.rows = values["step"], values["rows"]
        self.tokens.fill_(values["tokens"])


def model_tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name."""
    return {name: p.detach() for name, p in net.named_parameters()}


def optimizer_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors by parameter name: `model.norm.weight.exp_avg`."""
    names: dict[torch.Tensor, str] = {p: name for name, p in net.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert isinstance(value, torch.Tensor), (
                f"{key} of the optimizer is not a tensor: it would not be saved"
            )
            tensors[f"{names[parameter]}.{key}"] = value
    return tensors


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer allocate its state, by a step that changes no weight: zero gradients at a rate of
    zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def check_same_tensors(wanted: dict[str, dict[str, torch.Tensor]], saved: Metadata, where: str) -> None:
    """Raises CheckpointError unless the checkpoint has exactly these tensors with these shapes and dtypes.

    DCP itself ignores extra tensors and casts dtypes in silence.
    """
    flat = {f"{part}.{name}": t for part, tensors in wanted.items() for name, t in tensors.items()}
    kept = {k: v for k, v in saved.state_dict_metadata.items() if k.partition(".")[0] in wanted}
    problems = [f"{k} is missing" for k in flat if k not in kept]
    problems += [f"{k} is unexpected" for k in kept if k not in flat]
    for name in flat.keys() & kept.keys():
        entry, tensor = kept[name], flat[name]
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name} is not a tensor")
        elif tuple(entry.size) != tuple(tensor.shape):
            problems.append(f"{name} has shape {tuple(entry.size)}, the model's is {tuple(tensor.shape)}")
        elif entry.properties.dtype != tensor.dtype:
            problems.append(f"{name} is {entry.properties.dtype}, the model's is {tensor.dtype}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{where} does not fit this job: {'; '.join(sorted(problems)[:3])}{more}")
