"""A lazy view of a model's weights in any file format: named tensors from which any slice can be read.

Each format (dcp.py, huggingface.py, and those in formats.FORMATS) lists its tensors and loads chunks of them.
All other code is shared by the formats: it compares weights with a model, reads them into the model's
parameters on any layout, or writes them as a Hugging Face directory (export.py). Names are Hugging Face's.
Only one region is in memory at a time."""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import listed, model_tensors, saved_tensors
from titanlite.config.component import ConfigError
from titanlite.mesh import local_shard_and_offsets
from titanlite.models.base import Decoder, Index, ModelFamily, is_adapter
from titanlite.tokenizers.base import Tokenizer

Region = tuple[slice, ...]  # begin and end along each dimension of a tensor

FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
HEAD = "lm_head.weight"
# Architecture fields that models of other programs lack, with their values for these models.
UNSCALED = {"residual_scale": 1.0, "attention_scale": 1.0, "logit_scale": 1.0}


class Chunk(NamedTuple):
    """A contiguous block of a tensor in a file. `load` reads a region of the block, relative to its
    beginning, into host memory."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    load: Callable[[Region], torch.Tensor]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor stored in files as one or more chunks. `file`: one of the files, for messages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    chunks: Sequence[Chunk]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, region: Region) -> torch.Tensor:
        """Read a region into host memory, in the stored dtype. Raises CheckpointError if the chunks do not
        cover the region, or differ from their description."""
        shape = tuple(s.stop - s.start for s in region)
        whole, filled = None, 0
        for chunk in self._chunks_near(region):
            low = [max(s.start, o) for s, o in zip(region, chunk.offsets)]
            high = [min(s.stop, o + n) for s, o, n in zip(region, chunk.offsets, chunk.shape)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            values = chunk.load(tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets)))
            expected = tuple(b - a for a, b in zip(low, high))
            if values.dtype != self.dtype or tuple(values.shape) != expected:
                raise CheckpointError(
                    f"{self.file}: a block is {values.dtype} of shape {tuple(values.shape)}, expected "
                    f"{self.dtype} of shape {expected}"
                )
            if expected == shape:
                return values
            whole = torch.empty(shape, dtype=self.dtype) if whole is None else whole
            whole[tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, region))] = values
            filled += values.numel()
        if whole is None or filled != math.prod(shape):
            raise CheckpointError(f"{self.file} does not hold all of a tensor of shape {self.shape}")
        return whole

    def row_blocks(self) -> list[Region]:
        """Return regions that cover the tensor. They begin where chunks begin, so that no chunk is read
        twice."""
        if not self.shape:
            return [()]
        rest = tuple(slice(0, n) for n in self.shape[1:])
        return [(slice(a, b), *rest) for a, b in zip(self._begins, [*self._begins[1:], self.shape[0]])]

    def block_at(self, row: int) -> slice:
        """Return the block of rows of row_blocks that has `row`."""
        i = bisect.bisect_right(self._begins, row)
        return slice(self._begins[i - 1], self._begins[i] if i < len(self._begins) else self.shape[0])

    @functools.cached_property
    def _begins(self) -> list[int]:
        return sorted({0, *(chunk.offsets[0] for chunk in self.chunks)})

    def _chunks_near(self, region: Region) -> Sequence[Chunk]:
        """Return the chunks that may overlap a region. A tensor may have two chunks for each of 256 experts,
        which are read one by one."""
        if not region:
            return self.chunks
        begin, end = region[0].start, region[0].stop
        return [c for c in self.chunks if c.offsets[0] < end and c.offsets[0] + c.shape[0] > begin]


def region_at(index: Index, shape: Sequence[int]) -> Region:
    """Return the region of a tensor of this shape that `index` selects."""
    region = [
        slice(i, i + 1) if isinstance(i, int) else slice(*i.indices(size)[:2])
        for i, size in zip(index, shape)
    ]
    return (*region, *(slice(0, size) for size in shape[len(index) :]))


def shape_at(index: Index, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor that `index` selects from a tensor of this shape."""
    region = region_at(index, shape)
    return tuple(region[dim].stop - region[dim].start for dim in _kept_dims(index, len(shape)))


def _kept_dims(index: Index, num_dims: int) -> list[int]:
    return [dim for dim in range(num_dims) if dim >= len(index) or isinstance(index[dim], slice)]


def joined(parts: Sequence[tuple[LazyTensor, Index]], shape: tuple[int, ...]) -> LazyTensor:
    """Return the tensor of this shape from which each index selects the tensor beside it. All have one
    dtype."""
    chunks = []
    for stored, index in parts:
        region, dims = region_at(index, shape), _kept_dims(index, len(shape))
        sizes = tuple(s.stop - s.start for s in region)
        chunks.append(Chunk(tuple(s.start for s in region), sizes, functools.partial(_part, stored, dims)))
    return LazyTensor(shape, parts[0][0].dtype, parts[0][0].file, chunks)


def _part(stored: LazyTensor, dims: Sequence[int], region: Region) -> torch.Tensor:
    """Read a region of a chunk of a joined tensor, which has only the dims `dims` in its file."""
    values = stored.read(tuple(region[dim] for dim in dims))
    return values.reshape([s.stop - s.start for s in region])


@dataclass(frozen=True)
class Weights:
    """All tensors of a model by name, and the metadata of the model in their directory.

    `kind`: the name of the format, for messages. `architecture`: fields of the family's config, as far as
    they are recorded. `tokenizer`: fingerprint of the tokenizer that the model was trained with; "" if it is
    not recorded. `merged`: whether adapters were merged into the tensors, whose last bits may therefore
    depend on the machine."""

    path: Path
    kind: str
    tensors: Mapping[str, LazyTensor]
    architecture: Mapping[str, Any]
    tokenizer: str = ""
    merged: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


class ModelAndTokenizer(NamedTuple):
    """A model and its tokenizer. Row i of embedding and head is token id i; further rows are padding."""

    family: ModelFamily
    tokenizer: Tokenizer


def skeleton(weights: Weights, family: ModelFamily) -> Decoder:
    """Build the family's model on the meta device, to compare `weights` with it. Raises ConfigError if the
    model cannot be built, or has more blocks than `weights` has tensors: a damaged config.json may ask for a
    million blocks."""
    blocks, tensors = family.config.n_layers, len(weights.tensors)
    if blocks > tensors:
        raise ConfigError(
            f"{weights.path} has {tensors} tensors, too few for a model of {blocks} layers: its "
            "config.json, or the job's [model], describes another model"
        )
    try:
        return family.build_on_meta()
    except (RuntimeError, TypeError, OverflowError) as e:  # sizes that overflow
        raise ConfigError(f"{weights.path}: a model of its configuration cannot be built: {e}") from None


def with_parameters(weights: Weights, family: ModelFamily) -> Weights:
    """Return weights in which the tensors of Hugging Face's files that make up a parameter of the family's
    model, such as those of its experts, are replaced by this parameter. Tensors that do not make up a whole
    parameter stay as they are, so that check() reports them. Raises as skeleton does."""
    tensors, net = dict(weights.tensors), skeleton(weights, family)
    for name, ours in model_tensors(net).items():
        shape, files = tuple(ours.shape), net.hf_tensors(name, tuple(ours.shape))
        if name in tensors or not files or not all(part in tensors for part, _ in files):
            continue
        parts = [(tensors[part], index) for part, index in files]
        fits = all(stored.shape == shape_at(index, shape) for stored, index in parts)
        if fits and len({stored.dtype for stored, _ in parts}) == 1:
            for part, _ in files:
                del tensors[part]
            tensors[name] = joined(parts, shape)
    return replace(weights, tensors=tensors)


def check(weights: Weights, family: ModelFamily) -> None:
    """Raise ConfigError unless `weights` belongs to the family's model: the same architecture, names and
    shapes, in a floating-point dtype. Embedding and head may have fewer rows."""
    net = skeleton(weights, family)
    if contradictions(family.config.architecture_fields(), weights.architecture):
        raise ConfigError(f"{weights.path} is not the job's model: {_differences(weights, net, family)}")
    if absent := _absent_block(weights, net):
        raise ConfigError(
            f"{weights.path} has no weights of {absent}, the block for multi-token prediction: set the job's "
            "model.overrides.n_mtp_layers to 0, and so num_nextn_predict_layers (Qwen3.5: "
            "mtp_num_hidden_layers) in its config.json"
        )
    if differences := mismatches(weights, net):
        raise ConfigError(
            f"{weights.path} does not fit the job's model: {listed(differences, separator='; ')}"
        )


def _absent_block(weights: Weights, net: Decoder) -> str:
    """Return the name of the first training block of `net` of which `weights` has no tensor, or ""."""
    names, blocks = {module: name for name, module in net.named_modules()}, net.training_blocks()
    absent = [
        names[block]
        for block in blocks
        if not any(name.startswith(f"{names[block]}.") for name in weights.tensors)
    ]
    return absent[0] if absent else ""


def check_tokenizer(weights: Weights, tokenizer: Tokenizer, way_out: str) -> None:
    """Raise ConfigError if the weights were trained with another tokenizer. The message ends with the advice
    `way_out`."""
    if weights.tokenizer not in ("", tokenizer.fingerprint):
        raise ConfigError(f"{weights.path} was trained with another tokenizer than this one; {way_out}")


def mismatches(weights: Weights, net: Decoder, all_rows: bool = False) -> list[str]:
    """Return the differences between `weights` and the tensors of the unsharded model `net` that a checkpoint
    holds, each as a phrase. Unless `all_rows`, embedding and head of `weights` may have fewer rows."""
    ours = _expected(weights, net)
    vocabulary = vocabulary_of(net)
    copies = {copy: name for name, _ in net.named_parameters() for copy in net.hf_copies(name)}
    missing = [name for name in ours if name not in weights.tensors]
    differences = [f"{name} of shape {ours[name].shape} is missing" for name in missing]
    rows = {shape[0] for n in vocabulary & weights.tensors.keys() if (shape := weights.tensors[n].shape)}
    for name, stored in weights.tensors.items():
        where = f"{name} in {stored.file.name}"
        if name in copies:
            if not _are_equal(stored, weights.tensors.get(copies[name])):
                differences.append(f"{where} differs from {copies[name]}, but the model has one for both")
            continue
        if name not in ours:
            if name != HEAD or HEAD in vocabulary or len(vocabulary) != 1:
                differences.append(f"{where} is unexpected")
            elif not _are_equal(stored, weights.tensors.get(next(iter(vocabulary)))):
                config = weights.path / "config.json"
                source = f"{config} and " * config.exists()
                differences.append(
                    f"{where} differs from the embedding, but the job's model ties the two: set "
                    f"tie_word_embeddings to false in {source}the job's model.overrides"
                )
            continue
        expected, dtypes, _ = ours[name]
        fewer = not all_rows and name in vocabulary and stored.shape[:1] < expected[:1]
        if stored.shape[1:] != expected[1:] or not (fewer or stored.shape == expected):
            differences.append(f"{where} has shape {stored.shape}, the model's has {expected}")
        elif stored.dtype not in dtypes:
            differences.append(f"{where} is {stored.dtype}; quantized weights cannot be trained on")
        elif (first := weights.tensors.get(ours[name].first)) and stored.dtype != first.dtype:
            differences.append(f"{where} is {stored.dtype}, but {ours[name].first} is {first.dtype}")
    if len(rows) > 1:
        differences.append(f"embedding and head have different numbers of rows: {sorted(rows)}")
    return differences


class _Expected(NamedTuple):
    """A tensor that the weights of a model have to have. `first`: the name of the first tensor that holds the
    same parameter, whose dtype they share."""

    shape: tuple[int, ...]
    dtypes: Collection[torch.dtype]
    first: str


def _expected(weights: Weights, net: Decoder) -> dict[str, _Expected]:
    """Return the tensors that weights of the model `net` have to have, by name: the model's own, or those of
    Hugging Face's files if `weights` has any of them in place of a parameter."""
    expected = {}
    for name, tensor in saved_tensors(net).items():
        shape, files = tuple(tensor.shape), net.hf_tensors(name, tuple(tensor.shape))
        dtypes = FLOATS if tensor.is_floating_point() else {tensor.dtype}
        if name not in weights.tensors and any(part in weights.tensors for part, _ in files):
            for part, index in files:
                expected[part] = _Expected(shape_at(index, shape), dtypes, files[0][0])
        elif files or name in weights.tensors:
            expected[name] = _Expected(shape, dtypes, name)
    return expected


def check_own(weights: Weights, net: Decoder) -> None:
    """Raise CheckpointError unless a whole checkpoint fits the model `net` of its own configuration."""
    if faults := mismatches(weights, net, all_rows=True):
        raise CheckpointError(
            f"{weights.path} does not fit its own configuration: {listed(faults, separator='; ')}"
        )


def vocabulary_of(net: Decoder) -> set[str]:
    """Return the names of the parameters of `net` with a row for each token id: embedding and head."""
    return {name for name, _ in net.named_parameters() if net.parameter_role(name) in ("embedding", "head")}


def load_weights(weights: Weights, net: torch.nn.Module) -> None:
    """Read this rank's shard of each parameter of `net` in place, in the parameter's dtype. Rows of embedding
    and head that `weights` does not have keep their values, and so do adapters, and buffers that Hugging
    Face's files do not have. Not collective. check() must have passed."""
    buffers = {name for name, _ in net.named_buffers()}
    for name, tensor in model_tensors(net).items():
        if is_adapter(name) or (name in buffers and name not in weights.tensors):
            continue
        local, offsets = local_shard_and_offsets(tensor)
        stored = weights.tensors[name]
        stops = [min(o + n, size) for o, n, size in zip(offsets, local.shape, stored.shape)]
        if all(start < stop for start, stop in zip(offsets, stops)):
            region = tuple(slice(start, stop) for start, stop in zip(offsets, stops))
            local[: stops[0] - offsets[0]].copy_(stored.read(region))


def contradictions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `theirs` that differ from `ours`. Fields that either lacks are not compared."""
    return {k: theirs[k] for k, value in ours.items() if k in theirs and not _same(value, theirs[k])}


def _differences(weights: Weights, net: Decoder, family: ModelFamily) -> str:
    """Describe the fields in which the model of the weights differs from the job's model, and the option that
    makes them equal."""
    fields = vars(family.config) | family.config.architecture_fields()
    job = {key: value for key, value in fields.items() if key != "max_position"}
    theirs = {key: value for key, value in weights.architecture.items() if key != "vocab_size"}
    num_rows = [weights.tensors[n].shape[:1] for n in vocabulary_of(net) if n in weights.tensors]
    if (most := max(num_rows, default=())) > (net.vocab_size,):
        theirs["vocab_size"] = most[0]
    differences = contradictions(job, theirs)
    overrides = ", ".join(f"{key} = {json.dumps(value)}" for key, value in differences.items())
    return (
        "; ".join(f"its {key} is {value!r}, the job's {job[key]!r}" for key, value in differences.items())
        + f"; '--model.overrides={{{overrides}}}' makes the job's model equal"
    )


def _same(a: Any, b: Any) -> bool:
    numbers = type(a) in (int, float) and type(b) in (int, float)
    return math.isclose(a, b, rel_tol=1e-9) if numbers else a == b


def _are_equal(a: LazyTensor, b: LazyTensor | None) -> bool:
    if b is None or a.shape != b.shape:
        return False
    return all(torch.equal(a.read(region), b.read(region)) for region in a.row_blocks())
