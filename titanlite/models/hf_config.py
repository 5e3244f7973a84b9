"""Reading and writing Hugging Face's config.json for the decoders of `decoder.py`.

The fields have other names but the same values. Features that the decoder lacks are refused: another
activation, biases, or another rope type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.config.json_file import read_object
from titanlite.models.base import ModelFamily
from titanlite.models.decoder import RotaryConfig

FIELDS = {  # Hugging Face's name: field of RotaryConfig
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
FIXED: dict[str, Any] = {  # the only supported values; also the defaults of transformers
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
}


def to_hf(config: RotaryConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that describe `config`. `rope`: the rope type and its parameters; empty
    without scaling."""
    return {
        **{key: FIXED[key] for key in ("hidden_act", "attention_bias")},
        **{hf_key: getattr(config, name) for hf_key, name in FIELDS.items()},
        "rope_theta": config.rope_theta,
        # transformers 5 reads rope_parameters, older releases read rope_scaling.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **rope},
        "rope_scaling": rope or None,
    }


def from_hf(config: dict[str, Any], **defaults: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a RotaryConfig, and the rope parameters with `rope_type`. `defaults`: transformers'
    values for keys that may be missing. Raises ConfigError for other missing keys and for values that are not
    supported."""
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise ConfigError(
                f"config.json: {key} = {json.dumps(config[key])}; only {json.dumps(value)} is supported"
            )
    if config.get("quantization_config") is not None:
        raise ConfigError("config.json: quantization_config: quantized weights are not supported")
    given = defaults | {key: value for key, value in config.items() if value is not None}
    if "num_attention_heads" in given:
        given.setdefault("num_key_value_heads", given["num_attention_heads"])
        given.setdefault("head_dim", given.get("hidden_size", 0) // given["num_attention_heads"])
    if missing := [key for key in FIELDS if key not in given]:
        raise ConfigError(f"config.json has no {missing[0]}")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.pop("rope_theta", given.get("rope_theta", 10000.0))
    return {name: given[hf_key] for hf_key, name in FIELDS.items()} | {"rope_theta": theta}, rope


def check_rope_type(rope: dict[str, Any], *supported: str) -> None:
    """Raises ConfigError unless the type of rotary embedding is one of `supported`."""
    if rope["rope_type"] not in supported:
        known = " or ".join(json.dumps(name) for name in supported)
        raise ConfigError(
            f"config.json: rope_type {json.dumps(rope['rope_type'])} is not supported, {known} is"
        )


def read_family(folder: Path, wanted: ModelFamily | None = None) -> ModelFamily:
    """The family, with flavor and overrides, that the config.json in a Hugging Face directory describes.
    Raises ConfigError, which names the file, if titanlite has no such family, or if `wanted` is another
    family."""
    file = folder / "config.json"
    config = read_object(file)
    families = {
        f.hf_model_type: f
        for f in ModelFamily.choices.values()
        if issubclass(f, ModelFamily) and f.hf_model_type
    }
    families |= {wanted.hf_model_type: type(wanted)} if wanted is not None else {}
    kind = config.get("model_type")
    if kind not in families:
        raise ConfigError(
            f"{file}: model_type {json.dumps(kind)} is not supported (known: {', '.join(sorted(families))})"
        )
    if wanted is not None and kind != wanted.hf_model_type:
        raise ConfigError(
            f"{file}: model_type is {kind!r}, but the job's model is {wanted.hf_model_type!r} "
            f"(--model.name={families[kind].name})"
        )
    try:
        return families[kind].from_hf_config(config)
    except ConfigError as e:
        where = f"{folder}: {e.key}: " if e.key else f"{folder}: "
        raise ConfigError(f"{where}{e}") from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise ConfigError(f"{file} does not describe a {kind} model: {type(e).__name__}: {e}") from None
