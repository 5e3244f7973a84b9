"""Reading and writing Hugging Face's config.json for the decoders of `decoder.py`.

The fields have other names but the same values. Features that the decoder lacks are refused: another
activation, biases that differ from the family's, or another rope type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from titanlite.config.component import ConfigError
from titanlite.config.json_file import read_object
from titanlite.config.paths import PathText
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import ROPE_FIELDS, RotaryConfig, shortest_pattern

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


ROPE_KEYS = {  # parameters of the rope types; Hugging Face's name: field of RotaryConfig
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_max_position",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "attention_factor": "rope_attention_factor",
    "truncate": "rope_truncate",
}
ROPE_TYPES = {
    rope_type: {key: name for key, name in ROPE_KEYS.items() if name in fields}
    for rope_type, fields in {"default": set[str](), **ROPE_FIELDS}.items()
}
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
LEFT_OUT = {"attention_factor": 0.0, "truncate": True}  # defaults, which are not written
WITHOUT_DIRECTORY = "; a run that has started does not need it: resume with titanlite train RUN/job.toml"
LAYER_TYPES = {"L": "full_attention", "S": "sliding_attention", "D": "linear_attention"}
DEFAULT_WINDOW, DEFAULT_WINDOW_LAYERS = 4096, 28  # transformers' values for missing keys


def to_hf(config: RotaryConfig, rope_by_layer_type: bool = False) -> dict[str, Any]:
    """The keys of a config.json that describe `config`, apart from its sliding window. `rope_by_layer_type`:
    the family's rope_parameters have an object for each type of layer. Otherwise, raises ConfigError if the
    rotary embeddings of the layers differ. Raises ConfigError for layers without rotary positions."""
    if "N" in config.shortest_pattern:
        raise ConfigError(
            f"layer_pattern = {config.layer_pattern!r}: in Hugging Face's form of this family all layers "
            "have rotary positions",
            "model.overrides.layer_pattern",
        )
    if not rope_by_layer_type:
        _check_equal_ropes(config)
    rope: dict[str, Any] = {}
    if config.rope_factor != 1.0:
        fields = {key: getattr(config, name) for key, name in ROPE_TYPES[config.rope_type].items()}
        written = {key: value for key, value in fields.items() if value != LEFT_OUT.get(key)}
        rope = {"rope_type": config.rope_type} | written
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta, **rope}
    if rope_by_layer_type:
        theta = config.window_rope_theta or config.rope_theta
        window = {"rope_type": "default", **(rope if config.window_rope_scaled else {}), "rope_theta": theta}
        parameters = {LAYER_TYPES["L"]: parameters, LAYER_TYPES["S"]: window}
    return {
        "hidden_act": FIXED["hidden_act"],
        **{hf_key: getattr(config, name) for hf_key, name in FIELDS.items()},
        "rope_theta": config.rope_theta,
        # transformers 5 reads rope_parameters, older releases read rope_scaling.
        "rope_parameters": parameters,
        "rope_scaling": rope or None,
    }


def _check_equal_ropes(config: RotaryConfig) -> None:
    one = (config.rope_theta, config.rope_scaling)
    if any(kind.rope != one for kind in config.layer_kinds):
        raise ConfigError(
            f"window_rope_theta = {config.window_rope_theta}, window_rope_scaled = "
            f"{json.dumps(config.window_rope_scaled)}: in Hugging Face's form of this family all layers have "
            "the same rotary embedding; 'gemma3' and 'olmo3' have two",
            "model.overrides.window_rope_theta",
        )


def check_fixed(config: dict[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raises ConfigError if the config.json has a key of `fixed` with another value; a null is a missing
    key."""
    for key, value in fixed.items():
        if config.get(key) not in (None, value):
            raise ConfigError(
                f"config.json: {key} = {json.dumps(config[key])}; only {json.dumps(value)} is supported"
            )


def from_hf(
    config: dict[str, Any],
    unchecked: Collection[str] = (),
    rope_by_layer_type: bool = False,
    **defaults: Any,
) -> dict[str, Any]:
    """The fields of a RotaryConfig, apart from its sliding window. `unchecked`: keys of FIXED that the family
    reads itself or transformers ignores. `rope_by_layer_type`: as in to_hf. `defaults`: transformers' values
    for keys that may be missing. A null is a missing key. Raises ConfigError for other missing keys and for
    values that are not supported."""
    check_fixed(config, {key: value for key, value in FIXED.items() if key not in unchecked})
    if config.get("quantization_config") is not None:
        raise ConfigError("config.json: quantization_config: quantized weights are not supported")
    values = {key: value for key, value in (defaults | config).items() if value is not None}
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if "head_dim" not in values and {"num_attention_heads", "hidden_size"} <= values.keys():
        values["head_dim"], rest = divmod(values["hidden_size"], values["num_attention_heads"])
        if rest:
            raise ConfigError(
                f"config.json: hidden_size = {values['hidden_size']} is not a multiple of "
                f"num_attention_heads = {values['num_attention_heads']}, and head_dim is missing"
            )
    if missing := [key for key in FIELDS if key not in values]:
        raise ConfigError(f"config.json has no {missing[0]}")
    rope = _ropes_from_hf(values) if rope_by_layer_type else _rope_from_hf(values)
    return {name: values[hf_key] for hf_key, name in FIELDS.items()} | rope


def _ropes_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a RotaryConfig for the rotary embeddings of both types of layers. As in transformers,
    rope_theta and rope_scaling belong to full attention, and rope_local_base_freq, by default rope_theta, is
    the base of layers with a window; bases in rope_parameters come first."""
    full_type, window_type = LAYER_TYPES["L"], LAYER_TYPES["S"]
    parameters, scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    objects = {"rope_scaling": scaling, "rope_parameters": parameters}
    if isinstance(parameters, dict):
        if other := parameters.keys() - {full_type, window_type}:
            raise ConfigError(f"config.json: rope_parameters: {min(other)} is not a type of layer")
        objects |= {f"rope_parameters: {name}": value for name, value in parameters.items() if value}
    if wrong := [key for key, value in objects.items() if not isinstance(value, dict)]:
        raise ConfigError(f"config.json: {wrong[0]} is not an object")
    full_rope, window_rope = (parameters.get(name) or {} for name in (full_type, window_type))
    bases = {"rope_theta": config["rope_local_base_freq"]} if "rope_local_base_freq" in config else {}
    full = _rope_from_hf({**config, "rope_scaling": {}, "rope_parameters": full_rope | scaling})
    window = _rope_from_hf({**config, **bases, "rope_scaling": {}, "rope_parameters": window_rope})
    theta, is_scaled = window.pop("rope_theta"), window["rope_factor"] != 1.0
    if is_scaled and window.items() - full.items():
        raise ConfigError(
            f"config.json: rope_parameters: {window_type} has another scaling than {full_type}, which is not "
            "supported"
        )
    own = {"window_rope_theta": 0.0 if theta == full["rope_theta"] else theta}
    return full | own | ({"window_rope_scaled": is_scaled} if full["rope_factor"] != 1.0 else {})


def _rope_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a RotaryConfig for the rotary embedding. A parameter that its type does not read is
    ignored, as in transformers."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key, {}), dict):
            raise ConfigError(f"config.json: {key} is not an object")
    # transformers 5 writes rope_parameters, but prefers rope_scaling, which older releases wrote.
    parameters = config.get("rope_parameters", {})
    rope = config.get("rope_scaling") or parameters
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if parameters.get("rope_theta", theta) != theta:
        raise ConfigError(
            f"config.json: rope_theta is {theta}, in rope_parameters {parameters['rope_theta']}"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"config.json: rope_type {json.dumps(rope_type)} is not supported "
            f"(known: {', '.join(ROPE_TYPES)})"
        )
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError("config.json: a rope_type for each type of layer is not supported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not supported")
    # The length before the scaling is max_position_embeddings if it is not given, as in transformers.
    rope = {"original_max_position_embeddings": config["max_position_embeddings"], **rope}
    rope = {key: value for key, value in rope.items() if value is not None}
    if rope_type == "yarn":
        if rope.get("attention_factor") == 0:  # which RotaryConfig reads as the default
            raise ConfigError("config.json: attention_factor = 0 is not above 0")
        rope = YARN_DEFAULTS | {"attention_factor": _yarn_attention_factor(rope)} | rope
    if missing := [key for key in ROPE_TYPES[rope_type] if key not in rope]:
        raise ConfigError(f"config.json: rope_type {json.dumps(rope_type)} has no {missing[0]}")
    fields = {name: rope[key] for key, name in ROPE_TYPES[rope_type].items()}
    scaled = fields.get("rope_factor", 1.0) != 1.0
    if not scaled and fields.get("rope_attention_factor", 0.0) not in (0.0, 1.0):
        raise ConfigError("config.json: attention_factor is not supported with a factor of 1")
    return {"rope_theta": theta, **({"rope_type": rope_type, **fields} if scaled else {"rope_factor": 1.0})}


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    """rope_attention_factor of YaRN's parameters without attention_factor: 0, the default, unless mscale and
    mscale_all_dim, DeepSeek's parameters, give another value."""
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    factor = rope.get("factor", 1.0)
    if not over or not under or factor <= 1:
        return 0.0
    log = 0.1 * math.log(factor)
    return (over * log + 1.0) / (under * log + 1.0)


def layers_from_hf(layer_types: Any, num_layers: int, window: int, default: str) -> dict[str, Any]:
    """`sliding_window` and `layer_pattern` of a RotaryConfig, from the list `layer_types` of a config.json.
    `window`: of the layers that have one. `default`: layer_pattern if the list is missing or empty."""
    pattern = pattern_from_hf(layer_types, num_layers, default, RotaryConfig.letters)
    if "S" not in pattern:
        return {"sliding_window": 0, "layer_pattern": ""}
    return {"sliding_window": window, "layer_pattern": pattern if "L" in pattern else ""}


def pattern_from_hf(layer_types: Any, num_layers: int, default: str, letters: Collection[str]) -> str:
    """`layer_pattern` of a RotaryConfig, from the list `layer_types` of a config.json. `default`: the pattern
    if the list is missing or empty. `letters`: those that the family has."""
    pattern = default
    if layer_types:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise ConfigError(f"config.json: layer_types is not a list of {num_layers} layers")
        by_type = {name: letter for letter, name in LAYER_TYPES.items() if letter in letters}
        for layer_type in layer_types:
            if layer_type not in by_type:
                raise ConfigError(f"config.json: layer_types: {json.dumps(layer_type)} is not supported")
        pattern = "".join(by_type[layer_type] for layer_type in layer_types)
    return shortest_pattern(pattern, num_layers)


def layers_to_hf(config: RotaryConfig) -> dict[str, Any]:
    """The keys of a config.json for the sliding windows of the layers."""
    layer_types = [LAYER_TYPES[letter] for letter in config.layer_letters]
    return {"sliding_window": config.sliding_window or None, "layer_types": layer_types}


def qwen_window(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """`sliding_window` and `layer_pattern` of a RotaryConfig, from the config.json of a Qwen model. Without
    `layer_types`, the layers from the number max_window_layers on have the window."""
    if not config.get("use_sliding_window") or config.get("sliding_window", DEFAULT_WINDOW) is None:
        return {"sliding_window": 0, "layer_pattern": ""}
    layer_types, default = config.get("layer_types"), ""
    if not layer_types:
        first = config.get("max_window_layers", DEFAULT_WINDOW_LAYERS)
        if type(first) is not int:
            raise ConfigError(f"config.json: max_window_layers = {json.dumps(first)} is not an integer")
        mixed = 0 < first < num_layers
        default = "L" * first + "S" * (num_layers - first) if mixed else "S" if first <= 0 else "L"
    return layers_from_hf(layer_types, num_layers, config.get("sliding_window", DEFAULT_WINDOW), default)


def qwen_window_to_hf(config: RotaryConfig) -> dict[str, Any]:
    """The keys of a Qwen model's config.json for the sliding windows of the layers."""
    letters = config.layer_letters
    # For releases of transformers without layer_types: all layers from this number on have the window.
    first = len(letters) - len(letters.lstrip("L"))
    return layers_to_hf(config) | {"use_sliding_window": "S" in letters, "max_window_layers": first}


def check_equal_layers(config: RotaryConfig) -> None:
    """Raises ConfigError if layers have attention of different kinds, for families whose Hugging Face form
    has one kind."""
    if len(config.shortest_pattern) > 1:
        raise ConfigError(
            f"layer_pattern = {config.layer_pattern!r}: in Hugging Face's form of this family all layers "
            "have the same attention; 'qwen3' has layers of several kinds",
            "model.overrides.layer_pattern",
        )


def check_no_window(config: RotaryConfig) -> None:
    """Raises ConfigError if the model has a sliding window, for families whose Hugging Face form has none."""
    if config.sliding_window:
        raise ConfigError(
            f"sliding_window = {config.sliding_window}: Hugging Face's form of this family has no sliding "
            "window; 'mistral' has one",
            "model.overrides.sliding_window",
        )


def read_family(folder: Path, wanted: ModelFamily | None = None) -> ModelFamily:
    """The family, with flavor and overrides, that the config.json in a Hugging Face directory describes; of a
    multimodal model, the family of its text model. Raises ConfigError, which names the file, if titanlite has
    no such family, or if `wanted` is another family."""
    file = folder / "config.json"
    config = read_object(file)
    families = {
        f.hf_model_type: f
        for f in ModelFamily.choices.values()
        if issubclass(f, ModelFamily) and f.hf_model_type
    }
    families |= {wanted.hf_model_type: type(wanted)} if wanted is not None else {}
    multimodal = {f.hf_multimodal_type: f for f in families.values() if f.hf_multimodal_type}
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in multimodal:
        if not isinstance(config.get("text_config"), dict):
            raise ConfigError(f"{file}: text_config is missing or not an object")
        config, model_type = config["text_config"], multimodal[model_type].hf_model_type
    if not isinstance(model_type, str) or model_type not in families:
        raise ConfigError(
            f"{file}: model_type {json.dumps(model_type)} is not supported "
            f"(known: {', '.join(sorted(families))})"
        )
    if wanted is not None and model_type != wanted.hf_model_type:
        raise ConfigError(
            f"{file}: model_type is {model_type!r}, but the job's model is {wanted.hf_model_type!r}; a job "
            f"of this one has --model.name={families[model_type].name}"
        )
    try:
        return families[model_type].from_hf_config(config)
    except ConfigError as e:
        hf_keys = {f"overrides.{name}": key for key, name in (FIELDS | ROPE_KEYS).items()}
        where = f"{file}: {hf_keys.get(e.key, e.key)}: " if e.key else f"{folder}: "
        raise ConfigError(f"{where}{e}") from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise ConfigError(f"{file} does not describe a {model_type} model: {type(e).__name__}: {e}") from None


@dataclass(frozen=True, kw_only=True)
class HuggingFace(ModelFamily, name="huggingface"):
    """The model that the config.json in a Hugging Face directory describes. A run records family, flavor and
    overrides, and resumes without the directory's config.json."""

    flavor: ClassVar[str] = ""  # type: ignore[misc]  # no key: config.json decides it
    origin: ClassVar[str] = ""  # type: ignore[misc]  # no key: the path
    path: PathText
    """Directory with config.json. checkpoint.initial_load_path reads its weights, tokenizer.name =
    "huggingface" its tokenizer."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("empty; name a directory with a config.json", "path")

    def resolved(self) -> ModelFamily:
        try:
            family = read_family(Path(self.path))
        except ConfigError as e:
            missing = not (Path(self.path) / "config.json").exists()
            raise ConfigError(f"{e}{WITHOUT_DIRECTORY if missing else ''}", "path") from None
        return replace(family, overrides=family.overrides | self.overrides, origin=self.path)

    def build(self) -> Decoder:
        return self.resolved().build()
