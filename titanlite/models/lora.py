"""LoRA (Hu et al. 2021, arXiv 2106.09685): trains a low-rank update B A of the weights of chosen linear
layers, and freezes the model itself. Names and initial values are PEFT's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.config.component import ConfigError, check_at_least, suggest
from titanlite.models.base import Decoder
from titanlite.models.layers import Linear


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """LoRA: train and save adapters on linear layers of a frozen base model, read from
    checkpoint.initial_load_path also on resume."""

    enable: bool = False
    """Train adapters."""
    rank: int = 16
    """Rank of the product B A in y = W x + alpha / rank B A x."""
    alpha: float = 32.0
    """Numerator of alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["*"])
    """Linear layers of the blocks that get an adapter, by ends of names (`q_proj`, `mlp.down_proj`) or
    patterns (`*_proj`, `model.layers.0.*`); never experts and routers. Each must match. A resume may name the
    same layers otherwise."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rank")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"{self.alpha} is not above 0 and finite", "alpha")
        if not self.targets:
            raise ConfigError("empty: without adapters nothing would be trained", "targets")

    @property
    def scale(self) -> float:
        """The factor of the adapters' products."""
        return self.alpha / self.rank

    def check(self, initial_load_path: str, float8: bool) -> None:
        """Raises ConfigError if adapters do not work with the settings of other sections."""
        if not self.enable:
            return
        if not initial_load_path:
            raise ConfigError(
                "adapters need a base model: set checkpoint.initial_load_path to its directory", "lora.enable"
            )
        if float8:
            raise ConfigError("not supported with adapters (lora.enable)", "float8.enable")

    def apply(self, net: Decoder, pipeline_parallel: bool = False) -> None:
        """Freeze `net`, which is on the meta device, and give its targets adapters; nothing unless enabled.
        Call it before all transforms. Raises ConfigError for a target without a layer and, with
        `pipeline_parallel`, for a block without an adapter, because every stage has to have gradients."""
        if not self.enable:
            return
        if net.training_blocks():
            raise ConfigError(
                "adapters do not work with multi-token prediction, whose blocks PEFT's models lack: set "
                "model.overrides.n_mtp_layers = 0",
                "lora.enable",
            )
        blocks, layers = _blocks(net), _linear_layers(net)
        for i, target in enumerate(self.targets):
            if not any(_matches(name, target) for name in layers):
                known = set(map(_last, layers))
                raise ConfigError(
                    f"{target!r} matches no linear layer of the blocks{suggest(target, known)}",
                    f"lora.targets.{i}",
                )
        net.requires_grad_(False)
        for name in self._chosen(layers):
            parent, _, child = name.rpartition(".")
            with layers[name].weight.device:  # on the meta device, nothing is allocated or drawn
                adapted = LoRALinear(layers[name], self.rank, self.scale)
            setattr(net.get_submodule(parent), child, adapted)
        without = [
            name for block, name in blocks.items() if not any(p.requires_grad for p in block.parameters())
        ]
        if pipeline_parallel and without:
            raise ConfigError(
                f"pipeline parallel needs an adapter in every block; {without[0]} has none", "lora.targets"
            )

    def describe(self, net: Decoder) -> list[str]:
        """A line for the log, if adapters are trained. `net`: the whole model."""
        if not self.enable:
            return []
        trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in net.parameters()) - trained
        adapted = (name for name, layer in net.named_modules() if isinstance(layer, LoRALinear))
        kinds = Counter(map(_last, adapted))
        layers = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        return [
            f"adapters of rank {self.rank}, alpha {self.alpha:g}: {trained:,} parameters are trained, "
            f"{frozen:,} are frozen; {layers}"
        ]

    def identity(self, net: Decoder) -> dict[str, Any]:
        """The section `lora` of the run identity. Its targets are the chosen layers of the model `net`, which
        has no adapters, however `targets` spells them."""
        layers = _linear_layers(net)
        targets = short_names(self._chosen(layers), layers)
        return {"rank": self.rank, "alpha": self.alpha, "targets": targets}

    def _chosen(self, layers: Collection[str]) -> list[str]:
        """The names of the layers that get an adapter, among the names of all linear layers."""
        return [name for name in layers if any(_matches(name, target) for target in self.targets)]


def _blocks(net: Decoder) -> dict[nn.Module, str]:
    """The blocks of `net` with their names."""
    return {module: name for name, module in net.named_modules() if module in net.blocks().values()}


def _linear_layers(net: Decoder) -> dict[str, nn.Linear]:
    """The linear layers of the blocks by name, without routers."""
    return {
        f"{prefix}.{name}": layer
        for block, prefix in _blocks(net).items()
        for name, layer in block.named_modules()
        if type(layer) in (Linear, nn.Linear)
        if net.parameter_role(f"{prefix}.{name}.weight") != "router"
    }


def _matches(name: str, target: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def short_names(chosen: Collection[str], names: Collection[str]) -> list[str]:
    """The last components, such as `q_proj`, of the `chosen` names among all `names`, and the whole name if
    not all names with its last component are chosen. Sorted."""
    partly = {_last(name) for name in set(names).difference(chosen)}
    return sorted({name if _last(name) in partly else _last(name) for name in chosen})


def _last(name: str) -> str:
    return name.rpartition(".")[2]


class LoRALinear(Linear):
    """A linear layer with an adapter: y = W x + scale B A x. `layer`: the layer whose parameters it
    takes."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        self.lora_A = Linear(layer.in_features, rank)
        self.lora_B = Linear(rank, layer.out_features)
        self.product = low_rank_product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.product(x, self.lora_A.weight, self.lora_B.weight, self.scale)


def low_rank_product(x: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """scale B A x, for inputs of I features, outputs of O features and rank R."""
    return F.linear(F.linear(x, a_RI.to(x.dtype)) * scale, b_OR.to(x.dtype))


def initial_bound(name: str, shape: torch.Size) -> float:
    """The bound of the uniform distribution around 0 that initialises the parameter `name` of an adapter: 1 /
    sqrt(input features) for A, 0 for B, so that the adapter begins as 0."""
    return 1 / math.sqrt(shape[1]) if name.endswith("lora_A.weight") else 0.0
