"""Reads the weights of a Hugging Face directory: one safetensors file, or several with an index, and a
config.json.

Names and tensor layouts are equal to titanlite's, so nothing is converted. The exception is experts: the
files have a tensor for each matrix of each expert, which is a region of titanlite's parameter for all experts
of a layer; experts in MXFP4 are dequantised (mxfp4.py). Of a multimodal model, only the text model is read.
Files are memory-mapped. Their headers give the size of the content, so opening a truncated file is an
error."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titanlite.config.component import ConfigError
from titanlite.config.json_file import read_object
from titanlite.files import FileFault, check_regular
from titanlite.interop.mxfp4 import dequantized
from titanlite.interop.weights import (
    HEAD,
    UNSCALED,
    Chunk,
    LazyTensor,
    Region,
    Weights,
    contradictions,
    with_parameters,
)
from titanlite.log import logger
from titanlite.models.base import ModelFamily
from titanlite.models.hf_config import read_family
from titanlite.tokenizers.base import Tokenizer

KIND = "Hugging Face"
# Settings of generation_config.json that exports leave out, with the values that transformers gives them.
SETTINGS: dict[str, Any] = {"output_attentions": False, "output_hidden_states": False, "use_cache": True}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MULTI_TOKEN = "mtp."  # prefix of the weights of Qwen3.5's module for multi-token prediction
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


def is_hugging_face(path: Path) -> bool:
    """Return whether the directory has safetensors files."""
    return (path / INDEX).exists() or any(path.glob("*.safetensors"))


def is_peft_adapter(path: Path) -> bool:
    """Return whether the directory has a PEFT adapter and no whole model."""
    whole = (path / SINGLE).exists() or (path / INDEX).exists()
    return (path / "adapter_config.json").exists() and not whole


def open_hugging_face(path: Path, family: ModelFamily | None = None) -> Weights:
    """Open the weights in a directory. `family`: the model family that reads its config.json, and whose
    parameters the weights have as far as the files hold them; None: the files' tensors as they are. Raises
    ConfigError that names a file that is missing, damaged, or differs from the index."""
    tensors: dict[str, LazyTensor] = {}
    file_of = _index(path)
    for file in sorted({*file_of.values()}) if file_of else [_single(path)]:
        for name, stored in _tensors(path / file):
            if file_of.get(name, file) != file or name in tensors:
                raise ConfigError(f"{name} is in {path / file}, but {INDEX} says {file_of.get(name)}")
            # Old directories store these values, which are computed from the config.
            if not name.endswith("rotary_emb.inv_freq"):
                tensors[name] = stored
            file_of.pop(name, None)
    if file_of:
        name, file = next(iter(file_of.items()))
        raise ConfigError(f"{name} is not in {path / file}, where {INDEX} places it")
    tensors = tensors if family is None else dequantized(tensors)
    architecture = _architecture(path, family)
    if family is not None and family.hf_multimodal_type:
        tensors = _of_text(tensors)
        if not getattr(family.config, "n_mtp_layers", 0):  # left out, as by transformers
            tensors = {name: t for name, t in tensors.items() if not name.startswith(MULTI_TOKEN)}
            architecture = {key: value for key, value in architecture.items() if key != "n_mtp_layers"}
    weights = Weights(path, KIND, tensors, architecture)
    # The shapes of another architecture's parameters would not fit: check() says how it differs.
    if family is None or contradictions(family.config.architecture_fields(), weights.architecture):
        return weights
    return with_parameters(weights, family)


def _of_text(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the tensors of a multimodal model's text model, under the names of a text model's directory,
    which are `model.NAME` for `language_model.model.NAME` or `model.language_model.NAME`, the head, and the
    modules for multi-token prediction. In a text model's directory, all tensors."""
    text = {}
    for name, stored in tensors.items():
        before, _, after = name.partition("language_model.")
        if before in ("", "model.") and after:
            text[before + after] = stored
    if not text:
        return tensors
    beside = {name: t for name, t in tensors.items() if name == HEAD or name.startswith(MULTI_TOKEN)}
    return text | beside


def _index(path: Path) -> dict[str, str]:
    """Return the file of each tensor according to the index; empty without an index. A single file takes
    precedence, as in transformers."""
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        return {}
    tree = read_object(path / INDEX)
    file_of = tree.get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ConfigError(f"{path / INDEX} has no weight_map")
    for file in file_of.values():
        if not isinstance(file, str) or file != Path(file).name or not (path / file).is_file():
            raise ConfigError(f"{path / INDEX} names {file!r}, which does not exist")
    return file_of


def _single(path: Path) -> str:
    files = [file.name for file in sorted(path.glob("*.safetensors"))]
    if SINGLE in files or len(files) == 1:
        return SINGLE if SINGLE in files else files[0]
    if not files:
        raise ConfigError(f"{path} has no weights: neither {SINGLE} nor {INDEX}")
    raise ConfigError(f"{path} has {len(files)} safetensors files, but no {INDEX}")


def _tensors(file: Path) -> Iterator[tuple[str, LazyTensor]]:
    try:
        check_regular(file)
        opened = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 -- safe_open is not a dict
            stored = opened.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if dtype not in DTYPES:
                raise ConfigError(f"{file}: {name} has dtype {dtype}, which is not supported")
            load = functools.partial(_load, file, name, stored)
            yield name, LazyTensor(shape, DTYPES[dtype], file, [Chunk((0,) * len(shape), shape, load)])
    except (SafetensorError, OSError, FileFault) as e:
        raise ConfigError(f"{file} is not a complete safetensors file: {e}") from None


def _load(file: Path, name: str, stored: Any, region: Region) -> torch.Tensor:
    try:
        return stored[region] if region else stored[...]
    except SafetensorError as e:
        raise ConfigError(f"{file}: {name} cannot be read: {e}") from None


def warn_of_generation_settings(weights: Weights, tokenizer: Tokenizer) -> None:
    """Warn of settings in the directory's generation_config.json that exports will not have, because an
    export takes its settings from the tokenizer's folder."""
    file = weights.path / "generation_config.json"
    if weights.kind != KIND or not file.exists():
        return
    ours = tokenizer.generation_config()
    lost = [key for key, value in read_object(file).items() if ours.get(key, SETTINGS.get(key)) != value]
    if lost := [key for key in lost if key != "transformers_version" and not key.startswith("_")]:
        logger.warning(
            f"{file}: exports will have other values of {', '.join(lost)}, or none: those of the tokenizer; "
            f"--tokenizer.name=huggingface --tokenizer.path={weights.path} keeps them"
        )


def _architecture(path: Path, family: ModelFamily | None) -> dict[str, Any]:
    """Return the architecture fields in config.json; only UNSCALED without the file, which torchtitan does
    not write, or if the family does not read one."""
    if family is None or not family.hf_model_type or not (path / "config.json").exists():
        return UNSCALED
    return read_family(path, family).config.architecture_fields()
