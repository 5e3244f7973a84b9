"""The contents of a checkpoint: all state that cannot be recomputed, under names that do not depend on the
parallel layout.

Tensors are saved by torch DCP, which reshards them; all other state is a few numbers in train.json. The
learning rate and the data order are functions of these numbers and are not stored, so resuming never
overwrites a changed schedule."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from titanlite.config.component import ConfigError
from titanlite.data.skips import SkippedSequences
from titanlite.mesh import local_shard
from titanlite.models.base import is_adapter
from titanlite.optim.ema import WeightAverage
from titanlite.ranks import Ranks
from titanlite.storage import storage_of
from titanlite.torch_compat import foreach_norm, is_persistent, plain_tensor

TRAIN = "train.json"
STREAM = "stream"  # entry of train.json that only runs on a stream have
AVERAGED_FROM = "averaged_from"  # entry of train.json that only averages of checkpoints have
AVERAGE = "ema"  # the section of the weights' average
Tensors = dict[str, dict[str, torch.Tensor]]  # section, "model", "optimizer" or AVERAGE -> name -> tensor


class BaseModel(NamedTuple):
    """The base model that adapters were trained on. `path`: the absolute path of its directory, which is one
    checkpoint if it was given as a run folder. `sha256`: the fingerprint of its weights."""

    path: str
    sha256: str

    @staticmethod
    def recorded_in(train: dict[str, Any]) -> BaseModel | None:
        """The base model in a train.json; None: no adapters are trained."""
        return BaseModel(**train["base"]) if "base" in train else None


class Guard(Protocol):
    """The part of the guard of the steps (metrics/guard.py) that a checkpoint needs."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def is_healthy(self) -> bool:
        """Whether a run that diverges later can go back to the present state."""


@dataclass
class TrainState:
    """The state of a run, which is what a checkpoint holds. All of it that is not a tensor of `net`,
    `optimizer` or `average` is in train.json.

    `average`: of the weights; None or without tensors if there is none. `global_batch_size`: recorded for the
    next start. `step`: the newest step; train.py raises it when a step begins, and the next two values when
    the step ends. `num_sequences`: number of sequences of the data order that were trained on or skipped,
    which is the loader's state. `tokens`: number of target tokens trained on, an int64 scalar on the device.
    `skipped`: all sequences, before and after the position, that the run never trains on. `base`: the base
    model, if adapters are trained. `stream`: the state of the loaders of all ranks, if the run trains on a
    stream; otherwise {}. A save sets it."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    guard: Guard
    global_batch_size: int
    average: WeightAverage | None = None
    step: int = 0
    num_sequences: int = 0
    skipped: SkippedSequences = field(default_factory=SkippedSequences)
    base: BaseModel | None = None
    stream: dict[str, Any] = field(default_factory=dict)

    @property
    def next_sequence(self) -> int:
        """The first sequence that the next step trains on."""
        return self.skipped.next(self.num_sequences)

    def step_done(self, num_sequences: int, num_targets: torch.Tensor) -> None:
        """Count the sequences and the targets of a step that has ended. `num_sequences`: the position in the
        data order after the step."""
        self.num_sequences = num_sequences
        self.tokens += num_targets

    def tensors(self) -> Tensors:
        """The tensors that a checkpoint holds. The section of the average exists only if there is one."""
        optimizer = optimizer_tensors(self.net, self.optimizer)
        average = self.average.tensors if self.average else {}
        return {
            "model": saved_tensors(self.net),
            "optimizer": optimizer,
            **({AVERAGE: average} if average else {}),
        }

    def as_json(self) -> dict[str, Any]:
        """The state besides its tensors as plain values. Waits for the device."""
        return {
            "step": self.step,
            "sequences": self.num_sequences,
            "tokens": int(self.tokens),
            "skipped": self.skipped.as_lists(),
            "global_batch_size": self.global_batch_size,
            "guard": self.guard.state_dict(),
            "healthy": self.guard.is_healthy(),
            **({"base": self.base._asdict()} if self.base else {}),
            **({STREAM: self.stream} if self.stream else {}),
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Set the state besides its tensors from the values of a train.json. Sequences that were skipped
        before stay skipped."""
        self.step, self.num_sequences = values["step"], values["sequences"]
        self.tokens.fill_(values["tokens"])
        self.skipped |= SkippedSequences.merge(values["skipped"])
        self.guard.load_state_dict(values["guard"])
        self.stream = values.get(STREAM, {})


def read_train(path: PurePath) -> dict[str, Any]:
    """Read the train.json of a checkpoint. Its hash is not checked."""
    values: dict[str, Any] = json.loads(storage_of(path).read(path / TRAIN))
    return values


def model_tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and the persistent buffers by name."""
    tensors = {name: plain_tensor(p.detach()) for name, p in net.named_parameters()}
    for prefix, module in net.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                tensors[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    return tensors


def saved_tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of `net` that a checkpoint holds: without the frozen weights of a base model, if `net` has
    adapters."""
    tensors = model_tensors(net)
    if any(is_adapter(name) for name in tensors):
        frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in frozen}
    return tensors


def optimizer_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by `<parameter name>.<key>`, such as `model.norm.weight.exp_avg`."""
    names: dict[torch.Tensor, str] = {p: name for name, p in net.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"optimizer state {key!r} of {names[parameter]} is of type {type(value).__name__}, which "
                    "checkpoints do not save; make it a tensor, such as torch.tensor(0.0)",
                    "optimizer.name",
                )
            tensors[f"{names[parameter]}.{key}"] = value
    return tensors


def start_average(tensors: Tensors) -> None:
    """Set the average to the weights."""
    for name, average in tensors[AVERAGE].items():
        local_shard(average).copy_(local_shard(tensors["model"][name]))


def flattened(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors by DCP's names for them, `<section>.<name>`, such as `model.norm.weight`."""
    return {f"{section}.{name}": t for section, by_name in tensors.items() for name, t in by_name.items()}


def non_finite(tensors: Tensors) -> list[str]:
    """Names of this rank's weights, averages and optimizer state tensors that hold NaN or infinity. Waits for
    the device, and needs almost no memory.

    Scalars of the optimizer state may be infinite on purpose and are not checked, unless the parameter is a
    scalar, too."""
    shapes = {name: t.shape for name, t in tensors["model"].items()}
    local: dict[str, torch.Tensor] = {}
    for section, group in tensors.items():
        for name, tensor in group.items():
            parameter = name.rpartition(".")[0] if section == "optimizer" else name
            shard = local_shard(tensor)
            checked = tensor.ndim > 0 or shapes.get(parameter) == tensor.shape
            if checked and shard.is_floating_point() and shard.numel():
                local[f"{section}.{name}"] = shard
    if not local:
        return []
    largest = foreach_norm(list(local.values()), math.inf)  # the maximum of NaN and a number is NaN
    finite = torch.stack([norm.float() for norm in largest]).isfinite().tolist()
    return [name for name, ok in zip(local, finite) if not ok]


def listed(names: Sequence[str], num_shown: int = 3, separator: str = ", ") -> str:
    """The first names and the number of all further names, for messages."""
    more = f" (and {len(names) - num_shown} more)" if len(names) > num_shown else ""
    return separator.join(names[:num_shown]) + more


def total_bytes(tensors: Tensors, ranks: Ranks) -> int:
    """Bytes of the tensors of all ranks. A tensor that several ranks hold counts once. Collective."""
    sizes = {name: t.numel() * t.itemsize for name, t in flattened(tensors).items()}
    return sum(ranks.all_reduce(sizes, operator.or_).values())
