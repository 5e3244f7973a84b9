"""Reads weights under Meta's names: torchtitan's DCP checkpoints of Llama, Qwen3 and DeepSeek-V3, and Meta's
`consolidated.*.pth` files of Llama.

They differ from Hugging Face's weights in the names, and Llama's in the order of the rows of wq and wk, too.
Meta's rotary embedding rotates pairs of neighbouring elements of a head, (0, 1), (2, 3), ...; Hugging Face's
and titanlite's rotates pairs (e, e + head_dim / 2), and so does torchtitan's of Qwen3. This module alone
permutes these rows, head by head. (DeepSeek-V3 has neighbouring pairs in all three.)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint.reader import read_metadata
from titanlite.config.component import ConfigError
from titanlite.config.json_file import read_object
from titanlite.files import check_regular
from titanlite.interop.dcp import stored_tensors
from titanlite.interop.weights import UNSCALED, Chunk, LazyTensor, Region, Weights, joined, region_at
from titanlite.models.base import Index, ModelFamily
from titanlite.models.load_balance import CORRECTION_BIAS

OUTSIDE_BLOCKS = {  # Meta's name -> Hugging Face's name
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ffn_norm": "post_attention_layernorm",
    "moe.router.gate": "mlp.gate",
}
IN_BLOCK_OF_DEEPSEEK = IN_BLOCK | {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}
# wq, wk and wv are in `attention.` in torchtitan 0.2, and here in 0.3, also where one matrix computes them.
QKV_0_3 = "attention.qkv_linear."
# Experts of a layer in torchtitan 0.2 (`w1`) and 0.3 (`w1_EFD`): w1 is the gate projection [E, F, D], w3
# the up projection [E, F, D], w2 the down projection [E, D, F].
EXPERTS = re.compile(r"layers\.(\d+)\.moe\.(?:experts|routed_experts\.inner_experts)\.w([123])(?:_EFD|_EDF)?")
EXPERT_BIAS = re.compile(r"layers\.(\d+)\.moe\.expert_bias(?:_E)?")
COMPUTED = {"rope.freqs", "freqs_cis"}  # stored, but computed from the configuration
# The dimension along which Meta's tensor parallelism shards each weight over the files.
SHARD_DIMS = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


def is_meta(path: Path) -> bool:
    """Return whether the directory has Meta's files."""
    return any(path.glob("consolidated.*.pth"))


def open_torchtitan(path: Path, family: ModelFamily) -> Weights:
    """Open the weights in a step folder of torchtitan 0.1 to 0.3, without the states of optimizer and loader.
    Raises ConfigError or CheckpointError."""
    metadata = read_metadata(path)
    names = metadata.state_dict_metadata
    # torchtitan 0.2 saves weights without a prefix, earlier versions with the prefix `model`.
    prefix = next((p for p in ("", "model.") if f"{p}tok_embeddings.weight" in names), None)
    if prefix is None:
        raise ConfigError(
            f"{path} is a DCP checkpoint, but neither titanlite's nor a model of torchtitan's: it has no "
            f"tok_embeddings.weight, but {', '.join(sorted(names)[:3]) or 'nothing'}"
        )
    states = r"(optimizer|lr_scheduler|dataloader|train_state|ft_dataloader)\b"
    inside = {n.removeprefix(prefix): n for n in names if n.startswith(prefix) and not re.match(states, n)}
    if family.hf_model_type not in ("llama", "qwen3", "qwen3_moe", "deepseek_v3"):
        raise ConfigError(
            f"{path} has torchtitan's format, which is read for Llama, Qwen3 and DeepSeek-V3 only; the job's "
            f"model is {family.name}"
        )
    tensors = _renamed(_with_experts(stored_tensors(path, metadata, inside), path, family), family)
    return Weights(path, "torchtitan", tensors, UNSCALED)


def open_meta(path: Path, family: ModelFamily) -> Weights:
    """Open the weights in `consolidated.NN.pth` files, each of which has a shard of most tensors. Raises
    ConfigError for a file that is missing, incomplete, or holds more than tensors."""
    if family.hf_model_type != "llama":
        raise ConfigError(
            f"{path} has Meta's format, which is read for Llama only; the job's model is {family.name}"
        )
    files = sorted(path.glob("consolidated.*.pth"))
    expected = [f"consolidated.{i:02}.pth" for i in range(len(files))]
    if missing := [name for name, file in zip(expected, files) if file.name != name]:
        raise ConfigError(f"{path / missing[0]} is not there, but {files[-1].name} is")
    contents = [load_tensors(file) for file in files]
    for file, content in zip(files, contents):
        if odd := content.keys() ^ contents[0].keys():
            raise ConfigError(f"{file} and {files[0].name} do not both have {min(odd)}")
    num_files = _num_files(contents[0], family)
    if num_files > len(files):
        rest = ", ".join(f"consolidated.{i:02}.pth" for i in range(len(files), num_files))
        raise ConfigError(f"{path} has {len(files)} of the model's {num_files} files; {rest} is missing")
    tensors = {name: _joined(name, contents, files) for name in contents[0]}
    return Weights(path, "Meta", _renamed(tensors, family), _params(path, family))


def _with_experts(
    tensors: Mapping[str, LazyTensor], path: Path, family: ModelFamily
) -> dict[str, LazyTensor]:
    """Return the tensors with the experts of each layer under titanlite's names: gate and up projection are
    one tensor. Incomplete experts keep their names, so that they are reported. Raises ConfigError for a bias
    that balances experts, unless it is zero or the family has one."""
    result, names_of = dict(tensors), dict[str, dict[str, str]]()
    for name, stored in tensors.items():
        if match := EXPERTS.fullmatch(name):
            names_of.setdefault(f"model.layers.{int(match[1])}.mlp.experts", {})[match[2]] = name
        elif match := EXPERT_BIAS.fullmatch(name):
            if family.hf_model_type == "deepseek_v3":
                result[f"model.layers.{int(match[1])}.mlp.gate.{CORRECTION_BIAS}"] = stored
            elif stored.read(region_at((), stored.shape)).any():
                raise ConfigError(
                    f"{path}: {name} is not zero: it takes part in the choice of experts, and the job's "
                    "model lacks such a bias; torchtitan's export to Hugging Face (last_save_in_hf) "
                    "leaves it out, so that tokens choose other experts"
                )
            del result[name]
    for layer, names in names_of.items():
        if len(names) != 3:
            continue
        gate, down, up = (tensors[names[number]] for number in "123")
        if gate.shape != up.shape or gate.dtype != up.dtype or len(gate.shape) != 3:
            continue
        hidden = gate.shape[1]
        parts: list[tuple[LazyTensor, Index]] = [
            (gate, (slice(None), slice(0, hidden))),
            (up, (slice(None), slice(hidden, 2 * hidden))),
        ]
        for name in names.values():
            del result[name]
        result[f"{layer}.gate_up_proj"] = joined(parts, (gate.shape[0], 2 * hidden, gate.shape[2]))
        result[f"{layer}.down_proj"] = down
    return result


def _renamed(tensors: Mapping[str, LazyTensor], family: ModelFamily) -> dict[str, LazyTensor]:
    """Return the tensors under Hugging Face's names, the rows of Llama's wq and wk permuted. An unknown name
    stays, so that it is reported as unexpected."""
    renamed = {}
    names = IN_BLOCK_OF_DEEPSEEK if family.hf_model_type == "deepseek_v3" else IN_BLOCK
    for name, stored in tensors.items():
        block = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
        if name in COMPUTED:
            continue
        layer = block[2].replace(QKV_0_3, "attention.") if block else ""
        if block and layer in names:
            if layer in ("attention.wq", "attention.wk") and family.hf_model_type == "llama":
                stored = _rotate_half(stored, family.config.head_dim)
            renamed[f"model.layers.{int(block[1])}.{names[layer]}.weight"] = stored
        else:
            renamed[OUTSIDE_BLOCKS.get(name, name)] = stored
    return renamed


def _rotate_half(stored: LazyTensor, head_dim: int) -> LazyTensor:
    """Permute the rows of each head to the order 0, 2, 4, ..., 1, 3, 5, ..., so that the rows of a rotated
    pair, which are neighbours in Meta's order, are half a head apart."""

    def load(region: Region) -> torch.Tensor:
        begin, end = region[0].start, region[0].stop
        first = begin // head_dim * head_dim  # whole heads are read
        last = min(-(-end // head_dim) * head_dim, stored.shape[0])
        rows = stored.read((slice(first, last), *region[1:]))
        heads = rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(rows.shape)
        return heads[begin - first : end - first]

    return replace(stored, chunks=[Chunk((0,) * len(stored.shape), stored.shape, load)])


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Memory-map the tensors in a file. No code in the file is executed."""
    try:
        check_regular(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # torch.load of damaged bytes may raise almost any error
        line = re.search(r"Unsupported [^\n]*", str(e)) or re.search(r"[^\n]+", str(e))
        reason = f"{type(e).__name__}: {line[0] if line else ''}"
        raise ConfigError(f"{file} is not a complete file of tensors only: {reason}") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor) and t.ndim for name, t in content.items()
    ):
        raise ConfigError(f"{file} is not a dict of tensors with names and dimensions")
    return content


def _joined(name: str, contents: list[dict[str, torch.Tensor]], files: list[Path]) -> LazyTensor:
    """Return the full tensor. Each file has a shard along SHARD_DIMS, or a copy of the tensor (norms)."""
    shards = [content[name] for content in contents]
    dim = SHARD_DIMS.get(name.split(".")[-2] if "." in name else name)
    if name == "tok_embeddings.weight" and shards[0].ndim > 1:  # Llama 2 shards dim 1, Llama 3 dim 0
        dim = 1 if shards[0].shape[1] != contents[0].get("norm.weight", shards[0][0]).shape[0] else 0
    if dim is None or shards[0].ndim < 2:
        shards, dim = shards[:1], 0
    shape, size = tuple(shards[0].shape), shards[0].shape[dim]
    chunks = []
    for i, (file, shard) in enumerate(zip(files, shards)):
        if shard.shape != shape or shard.dtype != shards[0].dtype:
            raise ConfigError(f"{file}: {name} has shape {tuple(shard.shape)}, in {files[0].name} {shape}")
        offsets = tuple(i * size if d == dim else 0 for d in range(shard.ndim))
        chunks.append(Chunk(offsets, shape, functools.partial(torch.Tensor.__getitem__, shard)))
    full_shape = (*shape[:dim], size * len(shards), *shape[dim + 1 :])
    return LazyTensor(full_shape, shards[0].dtype, files[0], chunks)


def _num_files(content: Mapping[str, torch.Tensor], family: ModelFamily) -> int:
    """Return the number of files of a model, judging by the content of one: each file has all of the last
    norm and a shard of wq. 1 if the job's model has another shape, which check() reports."""
    wq, norm = content.get("layers.0.attention.wq.weight"), content.get("norm.weight")
    config = family.config
    if wq is None or norm is None or norm.shape != (config.dim,):
        return 1
    if config.n_heads * config.head_dim != config.dim:
        return 1
    return config.dim // len(wq) if wq.ndim == 2 and len(wq) and config.dim % len(wq) == 0 else 1


def _params(path: Path, family: ModelFamily) -> dict[str, Any]:
    """Return the architecture fields in params.json."""
    if not (path / "params.json").exists():
        return UNSCALED
    params = read_object(path / "params.json")
    fields = "dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta"  # as in titanlite
    named: dict[str, Any] = UNSCALED | {key: params[key] for key in fields if key in params}
    if not params.get("use_scaled_rope", False):
        return {**named, "rope_factor": 1.0}
    # The factor is in Meta's code: 8 for Llama 3.1, 32 for 3.2.
    return named if family.config.rope_factor != 1.0 else {**named, "rope_factor": 8.0}
