"""Float8: the matrix products of the blocks in 8 bits, by torchao. Layers are swapped under their names.

Weights stay fp32 in the optimizer and in checkpoints, so a run may switch float8 on or off when it resumes.
The head is left alone: the loss takes its weight, and there the precision counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel

from titanlite.config.component import ConfigError
from titanlite.log import logger
from titanlite.models.base import Decoder
from titanlite.torch_compat import float8_input_cast, float8_rowwise_parallel, is_float8_linear

MULTIPLE = 16  # what the hardware asks of the dims of a product's factors


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Compute the blocks' linear layers in float8 (Ada, Hopper, newer; `pip install 'titanlite[float8]'`)."""

    enable: bool = False
    """On or off. Needs compile.enable, without which it is slower than bfloat16."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How values are scaled. `tensorwise`: one scale per tensor, the fastest. `rowwise`: one per row of a
    matrix, more exact.
    `rowwise_with_gw_hp`: also the weights' gradients in bfloat16, the most exact."""
    enable_fsdp_float8_all_gather: bool = True
    """tensorwise: FSDP gathers weights in float8, half the bytes."""
    filter_fqns: list[str] = field(default_factory=list)
    """Layers to leave in bfloat16, by substrings of their names, for example `["k_proj", "layers.0."]`."""
    min_elements: int = 0
    """Leave layers whose weights have fewer elements than this: casting costs them more than it saves."""
    emulate: bool = False
    """Compute the same numbers on any device, slowly: for tests."""

    def __post_init__(self) -> None:
        if self.min_elements < 0:
            raise ConfigError(f"{self.min_elements} is below 0", "min_elements")

    @property
    def gathers_float8(self) -> bool:
        """Whether the weights are gathered in float8."""
        return self.has_one_scale and self.enable_fsdp_float8_all_gather

    @property
    def has_one_scale(self) -> bool:
        """Whether a whole tensor has one scale, so that what crosses the wires can be float8."""
        return self.enable and self.recipe == "tensorwise"

    def works_on(self, device: torch.device) -> bool:
        """Whether the device has what the recipe needs."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= self._needed

    def check(self, compiled: bool, micro_batch_tokens: int, cpu_offload: bool) -> None:
        """Raises ConfigError for settings of other sections that float8 does not work with.

        `compiled`: compile.enable. `micro_batch_tokens`: tokens of a micro-batch on one rank.
        """
        if self.enable and not (compiled or self.emulate):
            raise ConfigError(
                "without the compiler float8 is slower than bfloat16: set compile.enable", "float8.enable"
            )
        if self.enable and self.recipe != "rowwise_with_gw_hp" and micro_batch_tokens % MULTIPLE:
            raise ConfigError(
                f"float8 needs micro-batches of a multiple of {MULTIPLE} tokens; local_batch_size x seq_len "
                f"/ context_parallel_degree is {micro_batch_tokens}",
                "training.local_batch_size",
            )
        if cpu_offload and self.gathers_float8:
            raise ConfigError(
                "weights in the memory of the CPU cannot be gathered in float8: set "
                "float8.enable_fsdp_float8_all_gather = false",
                "training.enable_cpu_offload",
            )

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError for a device without float8."""
        if not self.enable or self.emulate or self.works_on(device):
            return
        here, (major, minor) = device.type, self._needed
        if device.type == "cuda":
            here = "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))
        raise ConfigError(
            f"{self.recipe} needs a CUDA device of compute capability {major}.{minor}, this is {here}; "
            "float8.emulate = true computes the same slowly",
            "float8.enable",
        )

    def check_library(self) -> None:
        """Raises ConfigError if float8 is on and torchao, which computes it, cannot be imported."""
        if self.enable:
            _torchao()

    @property
    def _needed(self) -> tuple[int, int]:
        return (8, 9) if self.recipe == "tensorwise" else (9, 0)


def split_layers(net: Decoder, config: Float8, ranks: int = 1) -> tuple[set[str], set[str]]:
    """The names of the blocks' linear layers: those that become float8, and those that are left. Raises
    ConfigError for a layer that float8 does not support, sharded over `ranks` by tensor parallel, and for a
    filter that matches none."""
    inside = {module for module in net.blocks().modules() if isinstance(module, nn.Linear)}
    layers = {name: module for name, module in net.named_modules() if module in inside}
    for part in config.filter_fqns:
        if not any(part in name for name in layers):
            raise ConfigError(
                f"{part!r} is in no layer's name; these are {_like(layers)} (the head is left out anyway)",
                "float8.filter_fqns",
            )
    left = {
        name
        for name, layer in layers.items()
        if any(part in name for part in config.filter_fqns) or layer.weight.numel() < config.min_elements
    }
    if left == layers.keys():
        key = "filter_fqns" if config.filter_fqns else "min_elements"
        raise ConfigError(f"float8 is left with no layer: {_like(layers)} are all left out", f"float8.{key}")
    odd = [
        name
        for name, layer in layers.items()
        if name not in left and any(size % MULTIPLE for size in _local_shape(name, layer, net, ranks))
    ]
    if odd:
        rows, columns = _local_shape(odd[0], layers[odd[0]], net, ranks)
        kinds = sorted({name.split(".")[-1] for name in odd})
        sharded = f" on each of tensor_parallel_degree = {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"{odd[0]} is {rows} x {columns}{sharded}, not multiples of {MULTIPLE}; leave all such layers "
            "out: " + json.dumps([*config.filter_fqns, *kinds]),
            "float8.filter_fqns",
        )
    return layers.keys() - left, left


def _local_shape(name: str, layer: nn.Linear, net: Decoder, ranks: int) -> tuple[int, int]:
    """The shape of a rank's shard of a layer's weight under tensor parallel."""
    rows, columns = layer.weight.shape
    styles = {style for pattern, style in net.tp_plan.items() if fnmatch(name, pattern)}
    return (
        rows // ranks if "colwise" in styles else rows,
        columns // ranks if "rowwise" in styles else columns,
    )


def apply_float8(net: Decoder, config: Float8, sharded: bool, ranks: int = 1) -> None:
    """Swap the blocks' linear layers, before tensor parallel over `ranks`, activation checkpointing, compile
    and FSDP. Raises ConfigError as split_layers does."""
    if not config.enable:
        return
    chosen, left = split_layers(net, config, ranks)
    torchao = _torchao()
    recipe = replace(torchao.Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)
    if config.gathers_float8 and sharded:
        recipe = replace(recipe, enable_fsdp_float8_all_gather=True)
    torchao.convert_to_float8_training(net, config=recipe, module_filter_fn=lambda _, name: name in chosen)
    rest = f"; not in it: {_like(left)} and the head" if left else "; the head is not in it"
    logger.info(f"float8 {config.recipe}: {len(chosen)} layers{rest}")


def shared_cast(module: nn.Module, config: Float8) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes float8 of the input of `module`, so that it is sent in 8 bits to all linear layers in it;
    None unless all of them take it so."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not all(_sends_float8(layer, config) for layer in layers):
        return None
    return float8_input_cast(layers[0])


def rowwise_style(module: nn.Module, config: Float8) -> type[RowwiseParallel]:
    """The tensor-parallel style of a row-wise layer, whose gradient may be sent in float8."""
    if not _sends_float8(module, config):
        return RowwiseParallel
    return float8_rowwise_parallel()


def _sends_float8(layer: nn.Module, config: Float8) -> bool:
    """Whether it is a float8 layer with one scale a tensor, which is what can be sent."""
    return config.has_one_scale and is_float8_linear(layer)


def precompute_scales(net: Decoder) -> None:
    """The scales of all weights that are gathered in float8, in one collective instead of one a layer."""
    _torchao().precompute_float8_dynamic_scale_for_fsdp(net)


def _like(names: Any) -> str:
    """Names for people: `16 x self_attn.k_proj`."""
    kinds = Counter(".".join(name.split(".")[-2:]) for name in names)
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


def _torchao() -> Any:
    try:
        import torchao.float8
    except ImportError as e:
        raise ConfigError(
            f"torchao cannot be imported ({e}): pip install 'titanlite[float8]'", "float8.enable"
        ) from None
    return torchao.float8
