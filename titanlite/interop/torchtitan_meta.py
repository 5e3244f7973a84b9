"""Llama weights under Meta's names: torchtitan's DCP checkpoints, and Meta's own `consolidated.*.pth`.

Two things differ from Hugging Face's: the names, and the order of the rows of q and k. Meta's rotary
embedding turns neighbouring elements of a head, (0, 1), (2, 3), ...; Hugging Face's, and ours, element e with
e + E/2. Here, and nowhere else, the rows are put from the one order into the other, head by head.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint import commit
from titanlite.checkpoint.reader import read_metadata
from titanlite.config.component import ConfigError
from titanlite.config.json_file import read_object
from titanlite.files import check_regular
from titanlite.interop.dcp import stored_tensors
from titanlite.interop.weights import Chunk, LazyTensor, Region, Weights
from titanlite.models.base import ModelFamily

ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ffn_norm": "post_attention_layernorm",
}
COMPUTED = {"rope.freqs", "freqs_cis"}  # from the configuration
DIVIDED = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}  # over Meta's files


def is_meta(path: Path) -> bool:
    """Whether these are Meta's files."""
    return any(path.glob("consolidated.*.pth"))


def is_foreign_dcp(path: Path) -> bool:
    """Whether this is a DCP checkpoint that titanlite has not committed."""
    return (path / ".metadata").exists() and not (path / commit.MANIFEST).exists()


def open_torchtitan(path: Path, family: ModelFamily) -> Weights:
    """The weights of a step folder of torchtitan 0.1 or 0.2; the optimizer's and the loader's state is left
    alone. Raises ConfigError or CheckpointError."""
    metadata = read_metadata(path)
    names = metadata.state_dict_metadata
    # torchtitan 0.2 saves the weights at the top, before that they were under `model`.
    prefix = next((p for p in ("", "model.") if f"{p}tok_embeddings.weight" in names), None)
    if prefix is None:
        raise ConfigError(
            f"{path} is a DCP checkpoint, but neither titanlite's nor of a Llama of torchtitan's: it has no "
            f"tok_embeddings.weight, but {', '.join(sorted(names)[:3]) or 'nothing'}"
        )
    rest = r"(optimizer|lr_scheduler|dataloader|train_state|ft_dataloader)\b"
    inside = {n.removeprefix(prefix): n for n in names if n.startswith(prefix) and not re.match(rest, n)}
    return Weights(path, "torchtitan", _ours(stored_tensors(path, metadata, inside), family, path), {})


def open_meta(path: Path, family: ModelFamily) -> Weights:
    """The weights in one or more `consolidated.NN.pth`, each of which has a part of most tensors. Raises
    ConfigError for a file that is missing, not whole, or holds more than tensors."""
    files = sorted(path.glob("consolidated.*.pth"))
    expected = [f"consolidated.{i:02}.pth" for i in range(len(files))]
    if missing := [name for name, file in zip(expected, files) if file.name != name]:
        raise ConfigError(f"{path / missing[0]} is not there, but {files[-1].name} is")
    parts = [_load(file) for file in files]
    for file, part in zip(files, parts):
        if odd := part.keys() ^ parts[0].keys():
            raise ConfigError(f"{file} and {files[0].name} do not both have {min(odd)}")
    number = _number_of_files(parts[0], family)
    if number > len(files):
        rest = ", ".join(f"consolidated.{i:02}.pth" for i in range(len(files), number))
        raise ConfigError(f"{path} has {len(files)} of the model's {number} files; {rest} is missing")
    tensors = {name: _joined(name, parts, files) for name in parts[0]}
    return Weights(path, "Meta", _ours(tensors, family, path), _params(path, family))


def _ours(tensors: Mapping[str, LazyTensor], family: ModelFamily, path: Path) -> dict[str, LazyTensor]:
    """Under our names, q and k in our order. A name that is not Meta's stays, to be told as unexpected."""
    if family.hf_model_type != "llama":
        raise ConfigError(
            f"{path} is torchtitan's or Meta's, of which Llama alone is read; the job's model is a "
            f"{family.name}"
        )
    found = {}
    for name, stored in tensors.items():
        block = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
        if name in COMPUTED:
            continue
        if block and block[2] in IN_BLOCK:
            if block[2] in ("attention.wq", "attention.wk"):
                stored = _rotate_half(stored, family.config.head_dim)
            found[f"model.layers.{int(block[1])}.{IN_BLOCK[block[2]]}.weight"] = stored
        else:
            found[ENDS.get(name, name)] = stored
    return found


def _rotate_half(stored: LazyTensor, head_dim: int) -> LazyTensor:
    """The rows of each head in the order 0, 2, 4, ..., 1, 3, 5, ...: those that Meta's layout turns together
    come to be half a head apart."""

    def load(region: Region) -> torch.Tensor:
        begin, end = region[0].start, region[0].stop
        first = begin // head_dim * head_dim  # whole heads are read
        last = min(-(-end // head_dim) * head_dim, stored.shape[0])
        rows = stored.read((slice(first, last), *region[1:]))
        heads = rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(rows.shape)
        return heads[begin - first : end - first]

    return replace(stored, chunks=[Chunk((0,) * len(stored.shape), stored.shape, load)])


def _load(file: Path) -> dict[str, torch.Tensor]:
    """Mapped, not read. Nothing in it is executed."""
    try:
        check_regular(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # of damaged bytes torch.load raises nearly anything
        said = re.search(r"Unsupported [^\n]*", str(e)) or re.search(r"[^\n]+", str(e))
        what = f"{type(e).__name__}: {said[0] if said else ''}"
        raise ConfigError(f"{file} is no whole file of tensors and nothing else: {what}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor) and t.ndim for name, t in found.items()
    ):
        raise ConfigError(f"{file} is no table of tensors that have names and dimensions")
    return found


def _joined(name: str, parts: list[dict[str, torch.Tensor]], files: list[Path]) -> LazyTensor:
    """A tensor of which each file has a part, along the dim that Meta's tensor parallelism divides, or all of
    it (norms)."""
    pieces = [part[name] for part in parts]
    dim = DIVIDED.get(name.split(".")[-2] if "." in name else name)
    if name == "tok_embeddings.weight" and pieces[0].ndim > 1:  # Llama 2 divided the other dim
        dim = 1 if pieces[0].shape[1] != parts[0].get("norm.weight", pieces[0][0]).shape[0] else 0
    if dim is None or pieces[0].ndim < 2 or len(pieces) == 1:
        pieces, dim = pieces[:1], 0
    shape = list(pieces[0].shape)
    for file, piece in zip(files, pieces):
        if list(piece.shape) != shape or piece.dtype != pieces[0].dtype:
            raise ConfigError(
                f"{file}: {name} has shape {tuple(piece.shape)}, in {files[0].name} {tuple(shape)}"
            )
    begins = itertools.accumulate((shape[dim] for _ in pieces[1:]), initial=0) if shape else [0]
    chunks = []
    for begin, piece in zip(begins, pieces):
        offsets = tuple(begin if i == dim else 0 for i in range(piece.ndim))
        chunks.append(Chunk(offsets, tuple(piece.shape), functools.partial(torch.Tensor.__getitem__, piece)))
    whole = tuple(n * len(pieces) if i == dim else n for i, n in enumerate(shape))
    return LazyTensor(whole, pieces[0].dtype, files[0], chunks)


def _number_of_files(part: Mapping[str, torch.Tensor], family: ModelFamily) -> int:
    """Over how many files the model is divided, by one of them: each has the whole of the last norm, and its
    share of the rows of wq. 1 if the job's model has another shape, which is told elsewhere."""
    wq, norm, c = part.get("layers.0.attention.wq.weight"), part.get("norm.weight"), family.config
    if wq is None or norm is None or norm.shape != (c.dim,) or c.n_heads * c.head_dim != c.dim:
        return 1
    return c.dim // len(wq) if wq.ndim == 2 and len(wq) and c.dim % len(wq) == 0 else 1


def _params(path: Path, family: ModelFamily) -> dict[str, Any]:
    """What params.json says, by the names of the family's config."""
    if not (path / "params.json").exists():
        return {}
    params = read_object(path / "params.json")
    fields = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")  # named as here
    named: dict[str, Any] = {key: params[key] for key in fields if key in params}
    if not params.get("use_scaled_rope", False):
        return {**named, "rope_factor": 1.0}
    # By how much is in Meta's code: 8 for Llama 3.1, 32 for 3.2.
    return named if family.config.rope_factor != 1.0 else {**named, "rope_factor": 8.0}
