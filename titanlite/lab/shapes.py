"""The ladder of a model: smaller models of its family, from which a scaling law is fitted.

They have the model's vocabulary and head_dim and, as nearly as their sizes allow, its ratios of width to
depth, of hidden units to width, and of query heads to key and value heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from titanlite.lab.width import hidden_dims, shape_at
from titanlite.models.base import ModelFamily

NUM_SIZES, SPACING = 4, 2.5  # by default the model's size divided by 2.5, 2.5^2, 2.5^3 and 2.5^4
TOLERANCE = 0.1  # by how much a size may differ from the one that was asked for
MULTIPLE = 64  # of hidden units: matrix products of other dims are slower on GPUs
MAX_ASPECT_CHANGE = 4.0  # factor by which dim / n_layers may differ from the model's
SIZE_WEIGHT = 3.0  # of the parameters beside the ratios: 3% of parameters count as 9% of a ratio


class Width(NamedTuple):
    """The models of one width: with L blocks, one has `outside` + L `per_block` parameters. `fields`: the
    fields of the config that depend on the width."""

    fields: dict[str, int]
    outside: int
    per_block: int


class Shape(NamedTuple):
    """A smaller model: the fields of its config that depend on the size, and its number of parameters.
    `change`: how far its ratios are from the model's; 0: they are equal."""

    fields: dict[str, int]
    parameters: int
    change: float


def default_sizes(parameters: int) -> list[int]:
    """The sizes below a model of so many parameters, the smallest first."""
    return [round(parameters / SPACING**i) for i in range(NUM_SIZES, 0, -1)]


def count(model: ModelFamily, fields: dict[str, int]) -> int:
    """The number of parameters of the model with other values of some fields of its config."""
    net = dataclasses.replace(model, overrides=model.overrides | fields).build_on_meta()
    return sum(p.numel() for p in net.parameters())


def widths(model: ModelFamily) -> Iterator[Width]:
    """The widths from one query head to the model's."""
    config = model.config
    for heads in range(1, config.n_heads + 1):
        if config.dim * heads % config.n_heads:
            continue
        fields = shape_at(config, config.dim * heads // config.n_heads)
        for name in hidden_dims(config):
            fields[name] = max(round(fields[name] / MULTIPLE), 1) * MULTIPLE
        one, two = (count(model, fields | {"n_layers": num}) for num in (1, 2))
        yield Width(fields, outside=2 * one - two, per_block=two - one)


def candidates(model: ModelFamily) -> list[Shape]:
    """Every smaller model that resembles the model."""
    return [shape for width in widths(model) for shape in _of_width(model, width)]


def nearest(shapes: Sequence[Shape], size: int) -> Shape | None:
    """The shape of about `size` parameters that changes the ratios least; None if there is none."""
    near = [shape for shape in shapes if abs(shape.parameters / size - 1) <= TOLERANCE]
    return min(
        near,
        key=lambda shape: shape.change + SIZE_WEIGHT * abs(math.log(shape.parameters / size)),
        default=None,
    )


def _of_width(model: ModelFamily, width: Width) -> Iterator[Shape]:
    """The shapes of one width."""
    config, fields = model.config, width.fields
    group = fields["n_heads"] / fields["n_kv_heads"] / (config.n_heads / config.n_kv_heads)
    scale = fields["dim"] / config.dim
    hidden = [fields[name] / (size * scale) for name, size in hidden_dims(config).items()]
    for layers in range(1, config.n_layers + 1):
        aspect = fields["dim"] / layers / (config.dim / config.n_layers)
        if abs(math.log(aspect)) <= math.log(MAX_ASPECT_CHANGE):
            change = sum(abs(math.log(ratio)) for ratio in (aspect, group, *hidden))
            parameters = width.outside + layers * width.per_block
            yield Shape(fields | {"n_layers": layers}, parameters, change)
