"""Rules that carry the settings of a model to another width.

The rules are muP's (Yang et al. 2022, arXiv 2203.03466, table 8), for models whose width grows by more
heads of the same size. With m = width / base width, relative to the settings at the base width:

    initial matrices of the blocks     standard deviation / sqrt(m)
    initial routers                    standard deviation / m
    the learning rate of both          / m ** p, where p is Optimizer.width_exponent: 1 for AdamW
    their weight decay                 * m ** p, because each step decays by learning rate x weight decay
    logits                             / m
    embedding, head, norms             as at the base width

The numbers of experts stay, and an expert's matrices are matrices of the blocks. A router has a fixed number
of outputs, as the head has (Malasnicki et al. 2025, arXiv 2508.09752): with larger initial weights its
gradient would outweigh the experts' gradient in a wide model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder, DecoderConfig, ModelFamily
from titanlite.models.decoder import RotaryConfig
from titanlite.models.deepseek_v3 import DeepSeekV3Config
from titanlite.models.gpt import GptConfig
from titanlite.models.moe import MULTIPLE, MoEConfig
from titanlite.models.qwen3_5 import Qwen3_5Config
from titanlite.optim.base import Optimizer, ParamGroup

SCALED_FIELDS = ("logit_scale", "matrix_init_std")  # of the model's config, which the rules set
ROUTER_FIELD = "router_init_std"  # set, too, if the model has experts


def check_widths(config: DecoderConfig) -> None:
    """Raises ConfigError if there are no rules for other widths of such a model."""
    if isinstance(config, DeepSeekV3Config):
        raise ConfigError(
            "there are no rules for other widths of latent attention: its ranks, and the key that all heads "
            "share, do not grow with the number of heads",
            "model.name",
        )
    if isinstance(config, Qwen3_5Config):
        raise ConfigError("there are no rules for other widths of gated delta nets", "model.name")
    if isinstance(config, GptConfig):
        raise ConfigError("gpt has rules for other depths: titanlite tune CONFIG --depth=N", "model.name")
    if isinstance(config, RotaryConfig) and config.embedding_scale != 1.0:
        raise ConfigError(
            "there are no rules for other widths of a model whose embedding is multiplied by sqrt(dim)",
            "model.name",
        )


def hidden_dims(config: DecoderConfig) -> dict[str, int]:
    """The fields of `config` with hidden units, which are in proportion to the width, and their values."""
    names = ("hidden_dim", "moe_hidden_dim") if isinstance(config, MoEConfig) else ("hidden_dim",)
    return {name: getattr(config, name) for name in names if getattr(config, name)}


def hidden_dims_at(config: DecoderConfig, width: int) -> dict[str, int]:
    """hidden_dims for dim = `width`. Those of experts are multiples of what their products need."""
    fields = {name: max(round(size * width / config.dim), 1) for name, size in hidden_dims(config).items()}
    if "moe_hidden_dim" in fields:
        fields["moe_hidden_dim"] = max(round(fields["moe_hidden_dim"] / MULTIPLE), 1) * MULTIPLE
    return fields


def shape_at(config: DecoderConfig, width: int) -> dict[str, int]:
    """The fields of `config` that depend on the width, for dim = `width`.

    head_dim and the ratios of all other sizes to dim are kept. If n_kv_heads would not divide n_heads, it is
    the largest divisor below. Raises ConfigError if the number of heads would not be whole, or if
    `check_widths` does."""
    check_widths(config)
    head_dim = config.head_dim
    query_features = config.n_heads * head_dim * width / config.dim
    heads = round(query_features / head_dim)
    if heads < 1 or not math.isclose(heads * head_dim, query_features):
        raise ConfigError(
            f"width {width} has {query_features:g} query features, no multiple of head_dim {head_dim}"
        )
    most = max(heads * config.n_kv_heads // config.n_heads, 1)
    return {
        "dim": width,
        "n_heads": heads,
        "n_kv_heads": max(k for k in range(1, most + 1) if heads % k == 0),
        **hidden_dims_at(config, width),
    }


def check_supported(model: ModelFamily, optimizer: Optimizer) -> None:
    """Raises ConfigError if there are no rules for the model family or the optimizer."""
    names = {f.name for f in dataclasses.fields(model.config)}
    if missing := [name for name in SCALED_FIELDS if name not in names]:
        raise ConfigError(
            f"{model.name!r} has no field {missing[0]}, which the width rules set", "model.name"
        )
    if any(optimizer.width_exponent(rule) is None for rule in optimizer.rules or ("",)):
        raise ConfigError(
            f"how the learning rate of {optimizer.name!r} has to change with the width is unknown "
            "(Optimizer.width_exponent)",
            "optimizer.name",
        )


def scales_at(config: DecoderConfig, multiple: float) -> dict[str, float]:
    """The fields of the model that the rules set, for a model that is `multiple` times as wide as the model
    that `config` was tuned for."""
    scale, std = (getattr(config, name) for name in SCALED_FIELDS)
    scales = dict(zip(SCALED_FIELDS, (scale / multiple, std / math.sqrt(multiple))))
    if isinstance(config, MoEConfig):
        scales[ROUTER_FIELD] = config.router_init_std / multiple
    return scales


def param_groups_at(optimizer: Optimizer, net: Decoder, multiple: float) -> list[ParamGroup]:
    """The optimizer's param_groups for a model that is `multiple` times as wide as the model that its
    settings were tuned for, without those that select no parameter of `net`, the whole model.

    Raises ConfigError if a pattern selects matrices of the blocks together with other parameters."""
    left = {name for name, p in net.named_parameters() if p.requires_grad}

    def factor_of(name: str, rule: str) -> float:
        if multiple == 1.0 or net.parameter_role(name) in ("embedding", "head", "norm"):
            return 1.0
        exponent = optimizer.width_exponent(rule or optimizer.default_rule(net, name))
        assert exponent is not None, "check_supported"
        return multiple**exponent

    groups = []
    for i, group in enumerate(optimizer.param_groups):
        names = {name for name in left if fnmatchcase(name, group.pattern)}
        left -= names
        factors = {factor_of(name, group.rule) for name in names}
        if len(factors) > 1:
            raise ConfigError(
                f"{group.pattern!r} selects matrices of the blocks and other parameters, which follow the "
                "width in different ways; divide the group",
                f"optimizer.param_groups.{i}.pattern",
            )
        groups += [_scaled(group, optimizer, factor) for factor in factors]
    by_factor: dict[float, set[str]] = {}
    for name in sorted(left):
        by_factor.setdefault(factor_of(name, ""), set()).add(name)
    for factor, names in by_factor.items():
        if factor != 1.0:
            groups += [_scaled(ParamGroup(pattern=p), optimizer, factor) for p in _patterns(names, left)]
            left -= names
    return groups


def _scaled(group: ParamGroup, optimizer: Optimizer, factor: float) -> ParamGroup:
    """The group with its learning rate divided and its weight decay multiplied by `factor`."""
    if factor == 1.0:
        return group
    decay = optimizer.weight_decay if group.weight_decay is None else group.weight_decay
    return dataclasses.replace(group, lr_multiplier=group.lr_multiplier / factor, weight_decay=decay * factor)


def _patterns(names: Collection[str], among: Collection[str]) -> list[str]:
    """Patterns that select `names` and no others of `among`: one for the common end of the names if it
    does, else one for each name, for all blocks."""
    lengths = range(min(map(len, names)), 0, -1)
    endings = (name[-length:] for length in lengths for name in list(names)[:1])
    ending = next((e for e in endings if all(name.endswith(e) for name in names)), "")
    if {name for name in among if name.endswith(ending)} == set(names):
        return [f"*{ending}"]
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})


def toml_lines(config: DecoderConfig, fields: Mapping[str, float], groups: list[ParamGroup]) -> Iterator[str]:
    """The lines of a TOML file that set the fields that differ from `config`, and param_groups."""
    changed = {key: value for key, value in fields.items() if value != getattr(config, key)}
    if changed:
        yield "[model.overrides]"
        yield from (
            f"{key} = {value if type(value) is int else f'{value:.6g}'}" for key, value in changed.items()
        )
    for group in groups:
        yield ""
        yield "[[optimizer.param_groups]]"
        yield f'pattern = "{group.pattern}"'
        yield f"lr_multiplier = {group.lr_multiplier:.6g}"
        if group.weight_decay is not None:
            yield f"weight_decay = {group.weight_decay:.6g}"
        yield from (f"{key} = {value:g}" for key, value in group.hyperparameters().items())
        if group.rule:
            yield f'rule = "{group.rule}"'
