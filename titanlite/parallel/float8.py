"""Float8: the blocks' linear layers compute in 8 bits, by torchao. Each layer is replaced under its name. If
asked for, so do the grouped products of experts, by torch's own kernel.

Weights stay fp32 in the optimizer and in checkpoints, so a run may switch float8 on or off when it resumes.
The head is not converted: the loss uses its weight and needs the precision.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel

from titanlite.config.component import ConfigError, check_at_least
from titanlite.log import logger
from titanlite.models.base import Decoder
from titanlite.models.grouped_mm import grouped_loop
from titanlite.models.moe import moe_layers_of
from titanlite.torch_compat import (
    float8_input_cast,
    float8_rowwise_parallel,
    is_float8_linear,
    scaled_grouped_mm,
)

MULTIPLE = 16  # the hardware needs matrices whose dims are multiples of this


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Float8 for the blocks' linear layers, on Ada, Hopper and newer GPUs. Routers stay in bfloat16, and so
    do experts unless `experts` is set. Needs torchao: `pip install 'titanlite[float8]'`."""

    enable: bool = False
    """Use float8. Needs compile.enable, without which it is slower than bfloat16."""
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale per tensor (fastest); one per row of a matrix (more precise); or per row, with gradients of
    weights in bfloat16 (most precise)."""
    experts: bool = False
    """Compute the grouped products with the weights of experts in float8, too, with one scale per row in
    every recipe, on Hopper and newer GPUs. Gradients of these weights are computed in bfloat16.
    `filter_fqns` and `min_elements` do not apply."""
    enable_fsdp_float8_all_gather: bool = True
    """With recipe tensorwise, FSDP gathers weights in float8: half of bfloat16's bytes."""
    filter_fqns: list[str] = field(default_factory=list)
    """Layers to leave in bfloat16, by substrings of names: `["k_proj", "layers.0."]`."""
    min_elements: int = 0
    """Leave layers with smaller weights in bfloat16: there, casting costs more than it saves."""
    emulate: bool = False
    """Compute the same numbers on any device, slowly, for tests."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "min_elements")

    @property
    def gathers_float8(self) -> bool:
        """Whether FSDP gathers weights in float8."""
        return self.has_one_scale and self.enable_fsdp_float8_all_gather

    @property
    def has_one_scale(self) -> bool:
        """Whether a tensor has a single scale, so that collectives can send it in float8."""
        return self.enable and self.recipe == "tensorwise"

    def check(self, compiled: bool, micro_batch_tokens: int, cpu_offload: bool) -> None:
        """Raises ConfigError if float8 does not work with the settings of other sections. `compiled`:
        compile.enable. `micro_batch_tokens`: number of tokens per micro-batch and rank."""
        if self.enable and not (compiled or self.emulate):
            raise ConfigError(
                "without the compiler float8 is slower than bfloat16: set compile.enable, on an NVIDIA GPU "
                "of compute capability 8.9 or newer",
                "float8.enable",
            )
        if self.enable and self.recipe != "rowwise_with_gw_hp" and micro_batch_tokens % MULTIPLE:
            raise ConfigError(
                f"float8 needs a multiple of {MULTIPLE} tokens per micro-batch; local_batch_size x seq_len "
                f"/ context_parallel_degree is {micro_batch_tokens}",
                "training.local_batch_size",
            )
        if cpu_offload and self.gathers_float8:
            raise ConfigError(
                "with CPU offload, weights cannot be gathered in float8: set "
                "float8.enable_fsdp_float8_all_gather = false",
                "training.enable_cpu_offload",
            )

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError if the device does not support the recipe or float8 for experts."""
        if not self.enable or self.emulate:
            return
        key, value = "experts" if self.experts else "enable", "true"
        if self.recipe != "tensorwise":
            key, value = "recipe", self.recipe
        major, minor = (8, 9) if key == "enable" else (9, 0)  # scales per row need Hopper
        actual = device.type
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability >= (major, minor):
                return
            actual = "compute capability {}.{}".format(*capability)
        raise ConfigError(
            f"float8.{key} = {value} needs a CUDA device of compute capability {major}.{minor}, this is "
            f"{actual}; float8.emulate = true computes the same slowly",
            f"float8.{key}",
        )

    def check_library(self) -> None:
        """Raises ConfigError if float8 is enabled and torchao cannot be imported."""
        if self.enable:
            _torchao()


def split_layers(net: Decoder, config: Float8, ranks: int = 1) -> tuple[set[str], set[str]]:
    """The names of the blocks' linear layers that are converted to float8, and of those that are not. Raises
    ConfigError for a layer whose shard float8 does not support, with tensor parallel over `ranks` ranks, and
    for a filter that matches no layer."""
    linears = {module for module in net.blocks().modules() if isinstance(module, nn.Linear)}
    layers = {name: module for name, module in net.named_modules() if module in linears}
    for pattern in config.filter_fqns:
        if not any(pattern in name for name in layers):
            raise ConfigError(
                f"{pattern!r} is in no layer's name; the layers are {_summary(layers)} (the head is never "
                "converted)",
                "float8.filter_fqns",
            )
    excluded = {
        name
        for name, layer in layers.items()
        if any(pattern in name for pattern in config.filter_fqns)
        or layer.weight.numel() < config.min_elements
    }
    if excluded == layers.keys():
        key = "filter_fqns" if config.filter_fqns else "min_elements"
        raise ConfigError(f"no layer remains in float8: it excludes {_summary(layers)}", f"float8.{key}")
    shapes = {name: _local_shape(name, layers[name], net, ranks) for name in layers if name not in excluded}
    unsupported = [name for name, shape in shapes.items() if any(size % MULTIPLE for size in shape)]
    if unsupported:
        rows, columns = shapes[unsupported[0]]
        kinds = sorted({name.split(".")[-1] for name in unsupported})
        sharded = f" on each of tensor_parallel_degree = {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"{unsupported[0]} is {rows} x {columns}{sharded}, not multiples of {MULTIPLE}; exclude all such "
            "layers: " + json.dumps([*config.filter_fqns, *kinds]),
            "float8.filter_fqns",
        )
    return layers.keys() - excluded, excluded


def _local_shape(name: str, layer: nn.Linear, net: Decoder, ranks: int) -> tuple[int, int]:
    """The shape of a rank's shard of the layer's weight, with tensor parallel over `ranks` ranks."""
    rows, columns = layer.weight.shape
    styles = {style for pattern, style in net.tp_plan.items() if fnmatch(name, pattern)}
    return (
        rows // ranks if styles & {"colwise", "gather_colwise"} else rows,
        columns // ranks if "rowwise" in styles else columns,
    )


def apply_float8(net: Decoder, config: Float8, sharded: bool, ranks: int = 1) -> None:
    """Replace the blocks' linear layers by float8 layers. Call it before all other transforms. `sharded`:
    whether FSDP follows; `ranks`: the number of tensor-parallel ranks. Raises ConfigError as split_layers
    does."""
    if not config.enable:
        return
    converted, excluded = split_layers(net, config, ranks)
    check_experts(net, config)
    torchao = _torchao()
    recipe = replace(torchao.Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)
    if config.gathers_float8 and sharded:
        recipe = replace(recipe, enable_fsdp_float8_all_gather=True)
    torchao.convert_to_float8_training(net, config=recipe, module_filter_fn=lambda _, name: name in converted)
    kept = [_summary(excluded)] if excluded else []
    experts = [layer.experts for layer in moe_layers_of(net)]
    if experts:
        kept = ["routers" if config.experts else "experts, routers", *kept]
    if config.experts:
        for layer in experts:
            layer.mm = partial(grouped_mm_by_rows, emulate=config.emulate)
    others = " and ".join([", ".join(kept), "the head"] if kept else ["the head"])
    also = f" and the experts of {len(experts)} blocks" if config.experts else ""
    logger.info(f"float8 {config.recipe}: {len(converted)} layers{also}; not converted: {others}")


def check_experts(net: Decoder, config: Float8) -> None:
    """Raises ConfigError if the experts of the model cannot be computed in float8, or if it has none."""
    if not config.experts:
        return
    layers = moe_layers_of(net)
    if not layers:
        raise ConfigError("the model has no experts", "float8.experts")
    shapes = [weight.shape[1:] for weight in layers[0].experts.parameters() if weight.ndim == 3]
    if any(size % MULTIPLE for shape in shapes for size in shape):
        listed = " and ".join(f"{rows} x {columns}" for rows, columns in shapes)
        raise ConfigError(
            f"the matrices of an expert are {listed}, not multiples of {MULTIPLE}", "float8.experts"
        )


def grouped_mm_by_rows(
    x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor, emulate: bool = False
) -> torch.Tensor:
    """grouped_mm of rows and weights in float8 (e4m3), with one scale per row of `x_RI` and of each weight.
    The scales are powers of two, as in torchao's recipe rowwise. `emulate`: multiply the same float8 numbers
    in fp32, on any device."""
    x8_RI, x_scale_R = _by_rows(x_RI)
    weight8_EOI, weight_scale_EO = _by_rows(weight_EOI)
    if emulate or not x_RI.shape[0]:
        rounded_EOI = weight8_EOI.float() * weight_scale_EO[..., None]
        out_RO = grouped_loop(x8_RI.float() * x_scale_R[:, None], rounded_EOI, ends_E)
    else:
        out_RO = scaled_grouped_mm(x8_RI, weight8_EOI.transpose(1, 2), x_scale_R, weight_scale_EO, ends_E)
    return out_RO.to(x_RI.dtype)


def _by_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in float8 and the scale of each row, [...]; their product is about `values`, [..., I]."""
    from torchao.float8 import float8_utils as torchao
    from torchao.float8.config import ScalingGranularity

    dtype = torch.float8_e4m3fn
    granularity = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    scale = torchao.tensor_to_scale(values, dtype, **granularity, round_scales_to_power_of_2=True)
    rounded = torchao.to_fp8_saturated(values.float() * scale, dtype)
    return rounded.contiguous(), scale.squeeze(-1).reciprocal()


def shared_cast(module: nn.Module, config: Float8) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The cast to float8 of the input of `module`, so that tensor parallel gathers the input in 8 bits; None
    unless all linear layers of the module take such an input."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not all(_sends_float8(layer, config) for layer in layers):
        return None
    return float8_input_cast(layers[0])


def rowwise_style(module: nn.Module, config: Float8) -> type[RowwiseParallel]:
    """The tensor-parallel style of a row-wise layer. If possible its gradient is sent in float8."""
    return float8_rowwise_parallel() if _sends_float8(module, config) else RowwiseParallel


def _sends_float8(layer: nn.Module, config: Float8) -> bool:
    """Whether collectives can send the layer's input and gradient in float8."""
    return config.has_one_scale and is_float8_linear(layer)


def precompute_scales(net: Decoder) -> None:
    """Compute the scales of all weights that FSDP gathers in float8, in a single collective."""
    _torchao().precompute_float8_dynamic_scale_for_fsdp(net)


def _summary(names: Iterable[str]) -> str:
    """Layers by the last two components of their names, with counts: `16 x self_attn.k_proj`."""
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
