"""Writes weights as a Hugging Face directory that transformers opens: safetensors files with an index,
config.json, generation_config.json and the tokenizer's files.

A safetensors file is a header with the position of each tensor, then the tensors' bytes. The header is known
before the first tensor is read, so tensors are copied one chunk at a time, and a model of any size needs the
memory of its largest chunk. Like a checkpoint, the directory is written under another name, synced and
renamed."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import write_file
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json
from titanlite.files import make_folder, sync
from titanlite.interop import huggingface
from titanlite.interop.formats import base_of, lora_of
from titanlite.interop.huggingface import INDEX, SINGLE
from titanlite.interop.weights import (
    LazyTensor,
    ModelAndTokenizer,
    Region,
    Weights,
    check,
    region_at,
    shape_at,
    vocabulary_of,
)
from titanlite.log import logger
from titanlite.models.base import Decoder, ModelFamily, is_adapter
from titanlite.models.lora import short_names
from titanlite.tokenizers.same_ids import verified_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in huggingface.DTYPES.items()}
OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")  # names of Hugging Face's experts, and of other MLPs
MAX_SHARD_BYTES = 5 * 10**9  # the default of transformers
BLOCK_BYTES = 32 << 20  # size of the blocks in which values are converted to another dtype


class ExportFormat(NamedTuple):
    """The form of an exported model. `dtype`: dtype of the written floating-point parameters; None: each
    keeps its own, as buffers always do. `keep_padding`: also write the rows of embedding and head without a
    token id."""

    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    keep_padding: bool = False


# How the Qwen2Tokenizer of transformers 5 splits texts, whatever tokenizer.json says.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT_FORMAT = ExportFormat()


class _Output(NamedTuple):
    """A tensor of an export: a region of `stored` times `factor` plus `offset`, in `dtype`. `shape`: the
    region's, perhaps without leading dims of size 1."""

    name: str
    stored: LazyTensor
    region: Region
    shape: tuple[int, ...]
    dtype: torch.dtype
    factor: float
    offset: float = 0.0

    @property
    def is_changed(self) -> bool:
        return (self.factor, self.offset) != (1.0, 0.0)

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_directory(
    weights: Weights,
    target: Path,
    model: ModelAndTokenizer,
    form: ExportFormat = DEFAULT_FORMAT,
) -> int:
    """Write `weights` as the new directory `target`. Returns the size of its tensors in bytes.

    Raises ConfigError if the weights belong to another model or `target` exists, CheckpointError if `target`
    cannot be written. An error leaves nothing on the disk."""
    check(weights, model.family)
    outputs, vocab_size = _outputs(weights, model, form)
    shards = _in_shards(outputs, form.max_shard_bytes)
    return _write(target, _small_files(model, outputs, vocab_size), shards, SINGLE)


def write_adapter(
    adapters: Weights, target: Path, family: ModelFamily, dtype: torch.dtype | None, base_path: Path | None
) -> int:
    """Write the adapters of a checkpoint as the new directory `target`, in PEFT's format. `dtype`: of the
    written tensors; None: each keeps its own. `base_path`: the directory of the base model that the format
    names; None: the recorded one. Returns and raises as write_directory does."""
    net, outputs = family.build_on_meta(), []
    for name, stored in adapters.tensors.items():
        if not is_adapter(name):  # a buffer that is state
            continue
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        factor = net.export_factor(f"{layer}.weight") if matrix == "lora_B" else 1.0
        region = region_at((), stored.shape)
        written = dtype or stored.dtype
        outputs.append(_Output(f"base_model.model.{name}", stored, region, stored.shape, written, factor))
    small = {"adapter_config.json": as_json(_peft_config(adapters, net, base_path))}
    return _write(target, small, [outputs], "adapter_model.safetensors")


def _peft_config(adapters: Weights, net: Decoder, base_path: Path | None) -> dict[str, object]:
    """Return the content of adapter_config.json. Raises ConfigError if PEFT would read it wrongly."""
    rank, alpha, _ = lora_of(adapters)
    ends = (".lora_A.weight", ".lora_B.weight")
    layers = {name.removesuffix(end) for name in adapters.tensors for end in ends if name.endswith(end)}
    # peft 0.21 (utils/transformers_weight_conversion.py) looks at the last component of a name only.
    of_mlps = sorted(name for name in layers if name.endswith(OF_EXPERTS))
    if net.moe_layers() and of_mlps:
        raise ConfigError(
            f"PEFT would take the adapter of {of_mlps[0]} for one of the experts: export the model with the "
            "adapters merged (without --adapter), or train adapters of other lora.targets"
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_path.resolve()) if base_path else base_of(adapters).path,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": short_names(layers, [name for name, _ in net.named_modules()]),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _write(
    target: Path,
    small: dict[str, bytes],
    shards: Sequence[Sequence[_Output]],
    single: str,
) -> int:
    """Write the small files and the tensors as the new directory `target`. `single`: the name of the file of
    tensors if there is only one. Other arguments, result and errors: see write_directory."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists; choose another directory, or delete it")
    size = sum(output.size for shard in shards for output in shard)
    partial = target.with_name(f".partial-{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        make_folder(target.parent)
        partial.mkdir()
        commit.check_space(target.parent, size, "the export")
        for name, content in small.items():
            write_file(partial / name, content)
        _write_shards(partial, shards, single)
        sync(partial)
        os.rename(partial, target)  # fails if `target` exists by now
        sync(target.parent)
    except BaseException as e:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(e, OSError):
            raise CheckpointError(f"{target} could not be written: {type(e).__name__}: {e}") from e
        raise
    return size


def _outputs(weights: Weights, model: ModelAndTokenizer, form: ExportFormat) -> tuple[list[_Output], int]:
    """Return the tensors of the export in the model's order, and the size of its vocabulary."""
    net = model.family.build_on_meta()
    vocabulary, outputs, vocab_size = vocabulary_of(net), [], net.vocab_size
    parameters = dict(net.named_parameters())
    for name, tensor in model_tensors(net).items():
        if not net.hf_tensors(name, tuple(tensor.shape)):
            continue
        stored = weights.tensors[name]
        shape = stored.shape
        if name in vocabulary:
            num_ids = model.tokenizer.vocab_size
            if shape[0] < num_ids:
                raise ConfigError(f"{weights.path}: {name} has {shape[0]} rows, the tokenizer {num_ids} ids")
            vocab_size = shape[0] if form.keep_padding else num_ids
            shape = (vocab_size, *shape[1:])
        # Buffers keep their dtype: a router's correction bias in bf16 would choose other experts.
        written = form.dtype if form.dtype and name in parameters else stored.dtype
        factor, offset = net.export_factor(name), net.export_offset(name)
        for part, index in net.hf_tensors(name, shape):
            region = region_at(index, shape)
            outputs.append(_Output(part, stored, region, shape_at(index, shape), written, factor, offset))
        region = region_at((), shape)
        outputs += [
            _Output(copy, stored, region, shape, written, factor, offset) for copy in net.hf_copies(name)
        ]
    return outputs, vocab_size


def _small_files(model: ModelAndTokenizer, outputs: Sequence[_Output], vocab_size: int) -> dict[str, bytes]:
    """Return all files but the weights, by name."""
    dtype = Counter(output.dtype for output in outputs).most_common(1)[0][0]
    # All versions of transformers read `torch_dtype`; later versions prefer `dtype`.
    config = {
        **model.family.hf_config(),
        "vocab_size": vocab_size,
        **model.tokenizer.model_ids(),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    tokenizer_files = verified_files(model.tokenizer)
    has_qwens_split = json.dumps(QWEN2_SPLIT).encode() in tokenizer_files["tokenizer.json"]
    if config["model_type"] == "qwen2" and not has_qwens_split:
        logger.warning(
            "transformers 5 splits the texts of all qwen2 models as Qwen's tokenizer does, which is not "
            "how this model was trained: open its tokenizer with PreTrainedTokenizerFast, not AutoTokenizer"
        )
    return {
        "config.json": as_json(config),
        "generation_config.json": as_json(model.tokenizer.generation_config()),
        **tokenizer_files,
    }


def _in_shards(outputs: Sequence[_Output], max_bytes: int) -> list[list[_Output]]:
    """Distribute tensors over files of at most `max_bytes`; a larger tensor is alone in its file."""
    shards: list[list[_Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.size > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.size
    return shards


def _write_shards(folder: Path, shards: Sequence[Sequence[_Output]], single: str) -> None:
    if len(shards) == 1:
        _write_shard(folder / single, shards[0])
        return
    file_of: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard)
        file_of |= {output.name: file for output in shard}
    size = sum(output.size for shard in shards for output in shard)
    write_file(folder / INDEX, as_json({"metadata": {"total_size": size}, "weight_map": file_of}))


def _write_shard(file: Path, shard: Sequence[_Output]) -> None:
    """Write a safetensors file: the header's length, the header, the tensors' bytes
    (https://huggingface.co/docs/safetensors)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in shard:
        begin, end = end, end + output.size
        header[output.name] = {
            "dtype": NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes, which aligns every dtype
    blocks = _Blocks()
    with open(file, "xb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for output in shard:
            for chunk in blocks.read(output):
                num_rows = max(BLOCK_BYTES // max(chunk[:1].numel() * output.dtype.itemsize, 1), 1)
                for block in chunk.split(num_rows):
                    # In fp64, so that values are rounded once.
                    exact = block.double() * output.factor + output.offset if output.is_changed else block
                    values = exact.to(output.dtype)
                    if not values.isfinite().all():
                        raise CheckpointError(_not_finite(output, block))
                    f.write(values.flatten().view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())


class _Blocks:
    """Reads the values of outputs in blocks of rows that begin where chunks begin. Keeps the newest block,
    because a checkpoint's chunk can only be read whole, and may have many outputs: the experts of a layer."""

    def __init__(self) -> None:
        self._stored: LazyTensor | None = None
        self._rows = slice(0, 0)
        self._values = torch.empty(0)

    def read(self, output: _Output) -> Iterator[torch.Tensor]:
        """Yield the values of `output`, some rows at a time."""
        (rows, *columns), stored = output.region, output.stored
        row = rows.start
        while row < rows.stop:
            block = stored.block_at(row)
            if stored is not self._stored or block != self._rows:
                self._values = torch.empty(0)  # frees the block before the next one is read
                self._values = stored.read((block, *region_at((), stored.shape)[1:]))
                self._stored, self._rows = stored, block
            end = min(block.stop, rows.stop)
            region = slice(row - block.start, end - block.start), *columns
            yield self._values[region].reshape(-1, *output.shape[1:])
            row = end


def _not_finite(output: _Output, values: torch.Tensor) -> str:
    """Return the error message for values of a tensor that are not finite in the export's dtype."""
    where = f"{output.stored.file}: {output.name}"
    if values.isfinite().all():
        return f"{where} has values too large for {NAMES[output.dtype]}; nothing is exported"
    return f"{where} has values that are not finite; nothing is exported"
