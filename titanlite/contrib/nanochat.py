"""Reads and writes the weights of nanochat's checkpoints, a folder of model_STEP.pt and meta_STEP.json, for
the family `gpt` (nanochat at 92d63d4, July 2026).

nanochat rotates queries and keys by the negative angle, which is titanlite's rotation with the two halves of
each head exchanged: the rows of their projections are exchanged here. Its windows do not count the token
itself. Its norms have the epsilon of F.rms_norm without one (fp32: 1.2e-7; bf16, on some devices: 0.0078),
which no checkpoint tells; gpt's is 1e-6, and `model.overrides.norm_eps` changes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.digest import write_file
from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json, read_object
from titanlite.contrib.meta_weights import load_tensors
from titanlite.files import new_folder
from titanlite.interop.weights import Chunk, LazyTensor, Weights, check, region_at
from titanlite.models.base import ModelFamily
from titanlite.models.decoder import shortest_pattern
from titanlite.models.gpt import Gpt, GptConfig

MODEL_FILE = re.compile(r"model_(\d+)\.pt")
PADDING = 64  # nanochat rounds vocabularies up to multiples
WINDOW_MULTIPLE = 128
FIXED = {  # fields that are constants in nanochat's code
    "rope_theta": 1e5, "attention_scale": 1.44, "residual_scale": 1.0, "logit_scale": 1.0,
    "logit_softcap": 15.0, "norms_heads": True, "has_squared_relu": True, "tie_word_embeddings": False,
    "value_gate_dims": 12, "rope_factor": 1.0,
}  # fmt: skip
PARTS = {  # fields of parts that old checkpoints lack, with the beginning of their tensors' names
    "residual_scalars": "resid_lambdas", "smear": "smear_lambda", "backout": "backout_lambda",
    "value_embedding_interval": "value_embeds.",
}  # fmt: skip
OUTSIDE_BLOCKS = {  # titanlite's name: nanochat's name
    "model.embed_tokens.weight": "transformer.wte.weight",
    "lm_head.weight": "lm_head.weight",
    "model.smear.gate": "smear_gate.weight",
    "model.smear.scale": "smear_lambda",
    "model.backout.scale": "backout_lambda",
}
IN_BLOCK = {
    "self_attn.q_proj.weight": "transformer.h.{}.attn.c_q.weight",
    "self_attn.k_proj.weight": "transformer.h.{}.attn.c_k.weight",
    "self_attn.v_proj.weight": "transformer.h.{}.attn.c_v.weight",
    "self_attn.o_proj.weight": "transformer.h.{}.attn.c_proj.weight",
    "self_attn.value_gate.weight": "transformer.h.{}.attn.ve_gate.weight",
    "self_attn.value_embedding.weight": "value_embeds.{}.weight",
    "mlp.up_proj.weight": "transformer.h.{}.mlp.c_fc.weight",
    "mlp.down_proj.weight": "transformer.h.{}.mlp.c_proj.weight",
}
IN_STACK = {"residual_mix.residual": "resid_lambdas", "residual_mix.embedding": "x0_lambdas"}  # [blocks]
EXCHANGED = ("q_proj.weight", "k_proj.weight")


def is_nanochat(path: Path) -> bool:
    """Whether the directory has weights of nanochat's."""
    return bool(_steps(path))


def _steps(path: Path) -> dict[int, Path]:
    """The files of weights in a directory by their steps."""
    matches = {file: MODEL_FILE.fullmatch(file.name) for file in path.glob("model_*.pt")}
    return {int(match[1]): file for file, match in matches.items() if match}


def open_nanochat(path: Path, family: ModelFamily) -> Weights:
    """Open the newest weights in a folder of nanochat's. Raises ConfigError."""
    if not isinstance(family, Gpt):
        raise ConfigError(
            f"{path} has nanochat's format, which is read for the model gpt only; the job's is {family.name}"
        )
    steps, config = _steps(path), family.config
    file = steps[max(steps)]
    meta = file.with_name(file.name.replace("model_", "meta_")).with_suffix(".json")
    if not meta.exists():
        raise ConfigError(f"{file} has no {meta.name} beside it, as nanochat writes it")
    content = {name.removeprefix("_orig_mod."): t for name, t in load_tensors(file).items()}
    tensors = dict[str, LazyTensor]()
    for ours, (theirs, element) in _names(config).items():
        if theirs in content:
            tensors[ours] = _lazy(_from_nanochat(ours, content[theirs], element, config), file)
    known = {theirs for theirs, _ in _names(config).values()}
    # Unknown names stay, so that they are reported as unexpected.
    tensors |= {name: _lazy(tensor, file) for name, tensor in content.items() if name not in known}
    return Weights(path, "nanochat", tensors, _architecture(meta, content))


def write_nanochat(weights: Weights, target: Path, family: ModelFamily) -> int:
    """Write weights of the family gpt as the new directory `target`, in fp32, in nanochat's format. Returns
    the size of the tensors in bytes. Raises ConfigError for a model that nanochat cannot express."""
    if not isinstance(family, Gpt):
        raise ConfigError(f"nanochat's format is for the model gpt; this one is {family.name}")
    check(weights, family)
    config: GptConfig = family.config
    fields = config.architecture_fields()
    window = config.sliding_window or 1
    expected = {
        **FIXED, "residual_scalars": True, "smear": True, "backout": True, "value_embedding_interval": 2,
        "hidden_dim": 4 * config.dim, "dim": config.n_heads * config.head_dim,
    }  # fmt: skip
    for key, value in expected.items():
        if key in fields and fields[key] != value:
            raise ConfigError(f"nanochat's models have {key} = {value}; this one has {fields[key]}")
    if (window - 1) % WINDOW_MULTIPLE:
        raise ConfigError(
            f"nanochat's windows are n x {WINDOW_MULTIPLE} + 1 tokens (129, 257, ...), not {window}"
        )
    if others := set(config.layer_letters) - set("SL"):
        raise ConfigError(f"nanochat's layers are S and L; layer_pattern has {min(others)}")
    if config.layer_letters[-1] != "L":
        raise ConfigError("nanochat's last layer has no window; that of layer_pattern is S")
    if config.vocab_size % PADDING:
        raise ConfigError(f"nanochat needs a vocabulary of a multiple of {PADDING} ids")
    content = dict[str, torch.Tensor]()
    for ours, (theirs, element) in _names(config).items():
        if (stored := weights.tensors.get(ours)) is None:
            continue
        values = stored.read(region_at((), stored.shape)).float()
        if ours.endswith(EXCHANGED):
            values = _with_halves_exchanged(values, config.head_dim)
        elif ours == "model.smear.gate":
            values = values[None]
        content[theirs] = values if element is None else torch.cat((content.get(theirs, values[:0]), values))
    meta = {
        "step": 0,
        "model_config": {
            "sequence_len": 4 * (window - 1) or config.max_position,
            "vocab_size": config.vocab_size, "n_layer": config.n_layers, "n_head": config.n_heads,
            "n_kv_head": config.n_kv_heads, "n_embd": config.dim, "window_pattern": config.layer_letters,
        },
    }  # fmt: skip
    with new_folder(target) as folder:
        torch.save(content, folder / "model_000000.pt")
        write_file(folder / "meta_000000.json", as_json(meta))
    return sum(tensor.nbytes for tensor in content.values())


def _names(config: GptConfig) -> dict[str, tuple[str, int | None]]:
    """nanochat's name of each parameter of a model, and the index of the element that it is; None: it is the
    whole tensor. Elements of one tensor are in order."""
    names = dict[str, tuple[str, int | None]]()
    for ours, theirs in OUTSIDE_BLOCKS.items():
        names[ours] = theirs, None
    for block in range(config.n_layers):
        for ours, theirs in IN_BLOCK.items():
            names[f"model.layers.{block}.{ours}"] = theirs.format(block), None
        for ours, theirs in IN_STACK.items():
            names[f"model.layers.{block}.{ours}"] = theirs, block
    return names


def _from_nanochat(name: str, tensor: torch.Tensor, element: int | None, config: GptConfig) -> torch.Tensor:
    """titanlite's form of the parameter `name`. A tensor of another shape stays, so that it is reported."""
    if element is not None:
        return tensor[element : element + 1]
    if name == "model.smear.gate":
        return tensor.flatten()
    is_whole = tensor.ndim == 2 and len(tensor) % config.head_dim == 0
    return (
        _with_halves_exchanged(tensor, config.head_dim) if name.endswith(EXCHANGED) and is_whole else tensor
    )


def _with_halves_exchanged(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    return rows.unflatten(0, (-1, 2, head_dim // 2)).flip(1).flatten(0, 2)


def _lazy(tensor: torch.Tensor, file: Path) -> LazyTensor:
    load = functools.partial(torch.Tensor.__getitem__, tensor)
    shape = tuple(tensor.shape)
    return LazyTensor(shape, tensor.dtype, file, [Chunk((0,) * tensor.ndim, shape, load)])


def _architecture(meta: Path, content: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The fields of GptConfig that a meta file and the names of the tensors tell. Raises ConfigError."""
    config = read_object(meta).get("model_config")
    sizes = ("sequence_len", "n_layer", "n_head", "n_kv_head", "n_embd")
    if not isinstance(config, dict) or any(
        type(config.get(key)) is not int or config[key] < 1 for key in sizes
    ):
        raise ConfigError(f"{meta} has no model_config with the numbers {', '.join(sizes)}, at least 1")
    seq_len, layers, heads, kv_heads, dim = (config[key] for key in sizes)
    if dim % heads:
        raise ConfigError(f"{meta}: n_embd = {dim} is no multiple of n_head = {heads}")
    letters = (str(config.get("window_pattern", "L")).upper() * layers)[: layers - 1] + "L"
    has = {field: any(name.startswith(start) for name in content) for field, start in PARTS.items()}
    return {
        **FIXED, **has, "value_embedding_interval": 2 * has["value_embedding_interval"],
        "dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": dim // heads,
        "hidden_dim": 4 * dim, "layer_pattern": shortest_pattern(letters, layers),
        "sliding_window": _window_of(seq_len) if "S" in letters else 0,
    }  # fmt: skip


def _window_of(seq_len: int) -> int:
    """sliding_window of nanochat's short windows: a quarter of the sequence, rounded up, and the token
    itself."""
    return -(-seq_len // 4 // WINDOW_MULTIPLE) * WINDOW_MULTIPLE + 1
