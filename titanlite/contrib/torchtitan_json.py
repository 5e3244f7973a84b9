"""Reads the JSON of torchtitan 0.3's trainer (`--debug.save_config_file`) for `titanlite migrate`.

torchtitan 0.3 is configured in Python. The JSON has the values of all settings, but not the classes that they
belong to: a policy of activation checkpointing and a loss are told by their keys, and a linear layer that a
converter made float8 looks like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config import json_file
from titanlite.config.component import ConfigError
from titanlite.contrib.torchtitan_keys import Values
from titanlite.files import FileFault, read_regular
from titanlite.models.base import ModelFamily
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_moe import Qwen3MoE

FLOAT8 = (
    "float8.enable: the JSON does not tell whether a converter changed the linear layers; set true for "
    "Float8LinearConverter, with its recipe; titanlite has no mxfp8 and no nvfp4"
)
BIAS = (
    "moe.load_balance: torchtitan 0.3 balances its qwen3 by a bias of the router, which titanlite's does not "
    "have; titanlite's default, 'global', balances the experts by a loss"
)
FAMILIES: dict[tuple[Any, bool], type[ModelFamily]] = {  # by torchtitan's name, and whether it has experts
    ("llama3", False): Llama3, ("qwen3", False): Qwen3, ("qwen3", True): Qwen3MoE,
}  # fmt: skip
NOT_READ = ("param_init", "sharding_config", "token_dispatcher")  # do not decide the function of the model
# The keys of a model and of its layers that give the architecture fields or do not matter.
ANY = {
    "dim", "vocab_size", "in_features", "out_features", "num_embeddings", "embedding_dim", "normalized_shape",
    "enable_weight_tying", "n_heads", "n_kv_heads", "head_dim", "block_size", "kernel_options", "max_seq_len",
    "theta", "scaling", "scaling_factor", "low_freq_factor", "high_freq_factor", "rope_factor", "beta_fast",
    "original_max_position_embeddings", "beta_slow", "original_seq_len", "truncate", "num_experts", "top_k",
    "hidden_dim", "route_norm", "load_balance_coeff",
}  # fmt: skip
# Other keys, and the only value that titanlite's families have.
ONLY: Values = {
    "bias": False, "elementwise_affine": True, "window_size": [-1, 0], "score_func": "softmax",
    "route_scale": 1.0, "num_expert_groups": None, "num_limited_groups": None, "shared_experts": None,
    "feed_forward": None, "moe": None, "qk_norm": None,
}  # fmt: skip
# Defaults of torch.optim.AdamW and of torchtitan's DistMuon, which a group may leave out.
ADAMW: Values = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
MUON: Values = {
    "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": None, "ns_steps": 5,
    "ns_coefficients": [3.4445, -4.775, 2.0315], "eps": 1e-7,
}  # fmt: skip


class Settings(NamedTuple):
    """A file's settings. `theirs`: torchtitan's keys, for the tables of torchtitan_keys.py. `ours`:
    titanlite's keys that are no translation of one key. `comments`: what became of the keys of `ours`.
    `todo`: lines on decisions that are left to the user."""

    theirs: Values
    ours: Values
    comments: list[str]
    todo: list[str]


def read(source: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None for a file that is not JSON, or cannot be read. Raises
    ConfigError for JSON that torchtitan's trainer has not written."""
    try:
        data = read_regular(source).lstrip()
        if not data.startswith(b"{"):  # as no TOML file does
            return None
        tree = json_file.parse(data)
    except (OSError, FileFault):
        return None
    except ValueError as e:
        raise ConfigError(f"{source} is neither JSON nor TOML: {e}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model_spec"), dict):
        raise ConfigError(
            f"{source} has no model_spec: it is not the JSON that torchtitan 0.3 writes with "
            "--debug.save_config_file"
        )
    return tree


def settings(tree: dict[str, Any], source: Path) -> Settings:
    """Return the settings of a file. Raises ConfigError for a model that titanlite does not have."""
    model, todo = _model(tree["model_spec"], source)
    theirs = _leaves({key: value for key, value in tree.items() if key != "model_spec"})
    groups = theirs.pop("optimizer.param_groups", None)
    try:
        optimizer, undecided = _optimizer(groups or [])
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        optimizer, undecided = {}, [f"optimizer.param_groups: cannot be read: {type(e).__name__}: {e}"]
    theirs["activation_checkpoint"] = _policy(tree.get("activation_checkpoint"))
    if "loss" in tree:
        theirs["loss"] = _loss(tree["loss"])
    comments = [
        f"model_spec.name = {tree['model_spec']['name']!r}",
        f"model_spec.flavor = {tree['model_spec'].get('flavor')!r}",
        "model_spec.model -> model.flavor, model.overrides, data.mask_documents",
        f"optimizer.param_groups -> {', '.join(optimizer) or 'nothing'}",
    ]
    if not theirs.get("validator.enable"):  # the JSON names its data all the same
        for key in ("validator.dataloader.dataset", "validator.dataloader.dataset_path"):
            comments.append(f"{key} = {theirs.pop(key, None)!r}: validation is off")
    ours = model | optimizer | {"float8.recipe": "rowwise"}  # the default of 0.3, which lacks tensorwise
    return Settings(theirs, ours, comments, [*todo, *undecided, FLOAT8])


def _leaves(tree: dict[str, Any], prefix: str = "") -> Values:
    """Return the values of nested objects under dotted keys. A list is one value."""
    leaves: Values = {}
    for key, value in tree.items():
        if key not in NOT_READ:
            leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def _policy(section: dict[str, Any] | None) -> str:
    """Return the mode of activation checkpointing, which the keys of the section tell."""
    if section is None:
        return "none"
    if "memory_budget" in section:
        return "memory_budget"
    return "selective" if "force_recompute_mm_shapes_by_fqns" in section else "full"


def _loss(section: dict[str, Any]) -> str:
    """Return the name of the loss, which the keys of the section tell; "other" for an unknown one."""
    names = {
        ("global_vocab_size",): "cross_entropy",
        ("loss_fn.global_vocab_size", "num_chunks"): "chunked_cross_entropy",
    }
    return names.get(tuple(sorted(_leaves(section))), "other")


def _model(spec: dict[str, Any], source: Path) -> tuple[Values, list[str]]:
    """Return titanlite's keys for the model, and TO DO lines. Raises ConfigError for a model of another
    family, or whose layers differ."""
    name, flavor, model = spec.get("name"), str(spec.get("flavor")), spec.get("model")
    if name not in [theirs for theirs, _ in FAMILIES]:
        raise ConfigError(f"{source}: model_spec.name = {name!r}: only llama3 and qwen3 can be migrated")
    try:
        if not isinstance(model, dict) or not model.get("layers"):
            raise ValueError("it has no layers")
        layer, *others = [_leaves(layer) for layer in model["layers"]]
        has_experts = "moe.num_experts" in layer
        family = FAMILIES.get((name, has_experts))
        if family is None or ("attention.qk_norm.eps" in layer) != (name == "qwen3"):
            raise ValueError(f"titanlite's {name} has other layers")
        if any(other != layer for other in others):
            raise ValueError(f"its layers differ; titanlite's {name} has equal ones")
        fields = _fields(model, layer, has_experts)
    except ValueError as e:
        raise ConfigError(f"{source}: model_spec.model: {e}") from None
    except (KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{source}: model_spec.model cannot be read: {type(e).__name__}: {e}") from None
    flavor = flavor if flavor in family.flavors else "debug"
    base = vars(family.flavors[flavor])
    ours: Values = {
        "model.name": family.name, "model.flavor": flavor,
        "model.overrides": {key: value for key, value in fields.items() if base[key] != value},
        "data.mask_documents": any(
            f"attention.inner_attention.{key}" in layer for key in ("block_size", "window_size")
        ),
    }  # fmt: skip
    only = ONLY | {"layers": model["layers"], "eps": fields["norm_eps"]}
    odd = [
        f"{key} = {value!r}"
        for key, value in (_leaves(model) | layer).items()
        if (last := key.split(".")[-1]) not in ANY and not (last in only and only[last] == value)
    ]
    lora = "; LoRA is the section [lora]" if any(".rank = " in text for text in odd) else ""
    todo = [f"model.overrides: titanlite's {family.name} has no {', '.join(odd)}{lora}"] if odd else []
    if has_experts and layer.get("moe.load_balance_coeff") is None:
        ours["moe.load_balance"] = "none"
    elif has_experts:
        todo.append(BIAS)
    return ours, todo


def _fields(model: dict[str, Any], layer: Values, has_experts: bool) -> Values:
    """Return titanlite's architecture fields."""
    rope = {key.rsplit(".", 1)[1]: value for key, value in layer.items() if key.startswith("attention.rope.")}
    if rope["scaling"] not in ("llama", "none"):
        raise ValueError(f"rope.scaling = {rope['scaling']!r} is neither 'llama' nor 'none'")
    fields: Values = {
        "dim": model["dim"],
        "n_layers": len(model["layers"]),
        "n_heads": layer["attention.n_heads"],
        "n_kv_heads": layer["attention.n_kv_heads"] or layer["attention.n_heads"],
        "head_dim": layer["attention.qkv_linear.head_dim"],
        "vocab_size": model["vocab_size"],
        "norm_eps": model["norm"]["eps"],
        "tie_word_embeddings": model["enable_weight_tying"],
        "rope_theta": float(rope["theta"]),
        "max_position": rope["max_seq_len"],
        "rope_factor": float(rope["scaling_factor"]) if rope["scaling"] == "llama" else 1.0,
    }
    if rope["scaling"] == "llama":
        fields |= {
            "rope_original_max_position": rope["original_max_position_embeddings"],
            "rope_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_high_freq_factor": float(rope["high_freq_factor"]),
        }
    if not has_experts:
        return fields | {"hidden_dim": layer["feed_forward.w1.out_features"]}
    return fields | {
        "n_experts": layer["moe.num_experts"],
        "n_experts_per_token": layer["moe.router.top_k"],
        "moe_hidden_dim": layer["moe.routed_experts.inner_experts.hidden_dim"],
        "norm_topk_prob": layer["moe.router.route_norm"],
    }


def _optimizer(groups: list[dict[str, Any]]) -> tuple[Values, list[str]]:
    """Return titanlite's keys for the groups of parameters, and TO DO lines. The group of all other
    parameters, pattern `.*`, gives the settings of AdamW; the first of DistMuon those of Muon."""
    rest = next((group for group in groups if group["pattern"] == ".*"), None)
    if rest is None:
        return {}, ["optimizer.param_groups: no group has the pattern '.*': set optimizer"]
    muon = next((group for group in groups if group["optimizer_name"] == "DistMuon"), None)
    adamw = ADAMW | rest["optimizer_kwargs"]
    ours: Values = {
        "optimizer.name": "muon" if muon else rest["optimizer_name"].lower(),
        "optimizer.lr": adamw["lr"],
        "optimizer.beta1": adamw["betas"][0],
        "optimizer.beta2": adamw["betas"][1],
        "optimizer.eps": adamw["eps"],
        "optimizer.weight_decay": adamw["weight_decay"],
    }
    todo = []
    if muon:
        theirs = MUON | muon["optimizer_kwargs"]
        ours |= {f"optimizer.{key}": theirs[key] for key in ("lr", "weight_decay", "momentum", "nesterov")}
        ours["optimizer.adamw_lr_multiplier"] = adamw["lr"] / theirs["lr"]
        scale = theirs["adjust_lr_fn"] or "original"
        ours["optimizer.adjust_lr_fn"] = scale.removesuffix("_unclamped")
        if theirs["ns_coefficients"] == MUON["ns_coefficients"]:
            ours |= {"optimizer.ns_coefficients": "jordan", "optimizer.ns_steps": theirs["ns_steps"]}
        else:
            todo.append(
                f"optimizer.ns_coefficients: titanlite has no ns_coefficients = {theirs['ns_coefficients']}"
            )
        todo.append(
            f"optimizer.param_groups: DistMuon has the parameters of {muon['pattern']!r}, titanlite's muon "
            "the matrices of the blocks: `rule` in optimizer.param_groups changes that"
        )
        if theirs["weight_decay"] != adamw["weight_decay"]:
            todo.append(f"optimizer.param_groups: AdamW's weight_decay = {adamw['weight_decay']}")
    for group in groups:
        if group is not rest and group is not muon:
            todo.append(
                f"optimizer.param_groups: {group['pattern']!r} has {group['optimizer_name']} with "
                f"{group['optimizer_kwargs']}: name these parameters as titanlite does"
            )
    todo += [f"optimizer.param_groups: {line}" for group in groups for line in _odd_settings(group)]
    return ours, todo


def _odd_settings(group: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each setting of a group that titanlite does not have."""
    known = {"DistMuon": MUON}.get(group["optimizer_name"], ADAMW)
    for key, value in group["optimizer_kwargs"].items():
        if key not in known and key not in ("fused", "foreach", "capturable") and value:
            yield f"titanlite has no {key} = {value!r}, which {group['pattern']!r} has"
