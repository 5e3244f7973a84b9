"""A lazy view of a model's weights that does not depend on the file format: named tensors of which any region
can be read.

Each format (huggingface.py, dcp.py, torchtitan_meta.py) lists its tensors and loads chunks of them.
Everything else is the same for all formats: weights are compared with a model, read into its parameters on
any layout, or written as a Hugging Face directory (export.py). Names are Hugging Face's. Only one region is
in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.mesh import local_shard
from titanlite.models.base import Decoder, ModelFamily
from titanlite.tokenizers.base import Tokenizer

Region = tuple[slice, ...]  # begin and end along each dimension of a tensor

FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
HEAD = "lm_head.weight"
SHOWN = 3  # mismatches named in one message


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

    def read(self, region: Region) -> torch.Tensor:
        """Read a region into host memory, in the stored dtype. Raises CheckpointError if the chunks do not
        cover the region, or differ from their description."""
        shape = tuple(s.stop - s.start for s in region)
        whole, filled = None, 0
        for chunk in self.chunks:
            low = [max(s.start, o) for s, o in zip(region, chunk.offsets)]
            high = [min(s.stop, o + n) for s, o, n in zip(region, chunk.offsets, chunk.shape)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            part = chunk.load(tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets)))
            wanted = tuple(b - a for a, b in zip(low, high))
            if part.dtype != self.dtype or tuple(part.shape) != wanted:
                raise CheckpointError(
                    f"{self.file}: a block is {part.dtype} of shape {tuple(part.shape)}, but its "
                    "description says "
                    f"{self.dtype} of shape {wanted}"
                )
            if wanted == shape:
                return part
            whole = torch.empty(shape, dtype=self.dtype) if whole is None else whole
            whole[tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, region))] = part
            filled += part.numel()
        if whole is None or filled != math.prod(shape):
            raise CheckpointError(f"{self.file} does not hold all of a tensor of shape {self.shape}")
        return whole

    def row_blocks(self, num_rows: int) -> list[Region]:
        """Regions that cover the first `num_rows` rows, divided where chunks begin, so that no chunk is read
        twice."""
        begins = sorted({0, *(o for chunk in self.chunks if (o := chunk.offsets[0]) < num_rows)})
        rest = tuple(slice(0, n) for n in self.shape[1:])
        return [(slice(a, b), *rest) for a, b in zip(begins, [*begins[1:], num_rows])]


@dataclass(frozen=True)
class Weights:
    """All tensors of a model by name, and what their directory says about the model.

    `kind`: the name of the format, for messages. `architecture`: fields of the family's config, as far as
    they are recorded. `tokenizer`: fingerprint of the tokenizer that the model was trained with; "" if it is
    not recorded."""

    path: Path
    kind: str
    tensors: Mapping[str, LazyTensor]
    architecture: Mapping[str, Any]
    tokenizer: str = ""


class ModelAndTokenizer(NamedTuple):
    """A model and its tokenizer, whose ids are the first rows of embedding and head."""

    family: ModelFamily
    tokenizer: Tokenizer


def skeleton(weights: Weights, family: ModelFamily) -> Decoder:
    """Build the family's model on the meta device, to compare `weights` with it. Raises ConfigError if it
    cannot be built, or has more blocks than `weights` has tensors: a damaged config.json may ask for a
    million blocks."""
    blocks, tensors = family.config.n_layers, len(weights.tensors)
    if blocks > tensors:
        raise ConfigError(
            f"{weights.path} has {tensors} tensors, too few for a model of {blocks} layers: its "
            "config.json, or the job's [model], describes another model"
        )
    try:
        with torch.device("meta"):
            return family.build()
    except (RuntimeError, TypeError, OverflowError) as e:  # sizes that overflow
        raise ConfigError(f"{weights.path}: a model of its configuration cannot be built: {e}") from None


def check(weights: Weights, family: ModelFamily) -> None:
    """Raises ConfigError unless `weights` belongs to the family's model: the same architecture, names and
    shapes, in a floating-point dtype. It may have fewer rows of the vocabulary."""
    net = skeleton(weights, family)
    if contradictions(family.config.architecture_fields(), weights.architecture):
        raise ConfigError(
            f"{weights.path} has another model than the job: {_differences(weights, net, family)}"
        )
    if differences := mismatches(weights, net):
        raise ConfigError(f"{weights.path} does not fit the job's model: {first_of(differences)}")


def check_tokenizer(weights: Weights, tokenizer: Tokenizer, way_out: str) -> None:
    """Raises ConfigError, which ends with the advice `way_out`, if the weights were trained with another
    tokenizer."""
    if weights.tokenizer not in ("", tokenizer.fingerprint):
        raise ConfigError(f"{weights.path} was trained with another tokenizer than this one; {way_out}")


def mismatches(weights: Weights, net: Decoder, all_rows: bool = False) -> list[str]:
    """The differences between `weights` and the parameters of the unsharded model `net`, each as a phrase.
    Unless `all_rows`, `weights` may have fewer rows of the vocabulary."""
    wanted = {name: tuple(p.shape) for name, p in model_tensors(net).items()}
    vocabulary = vocabulary_of(net)
    missing = [name for name in wanted if name not in weights.tensors]
    differences = [f"{name} of shape {wanted[name]} is missing" for name in missing]
    rows = {shape[0] for n in vocabulary & weights.tensors.keys() if (shape := weights.tensors[n].shape)}
    for name, stored in weights.tensors.items():
        where = f"{name} in {stored.file.name}"
        if name not in wanted:
            if name != HEAD or HEAD in vocabulary or len(vocabulary) != 1:
                differences.append(f"{where} is unexpected")
            elif not _have_equal_values(stored, weights.tensors.get(next(iter(vocabulary)))):
                differences.append(
                    f"{where} differs from the embedding, to which the job's model ties its head"
                )
            continue
        expected = wanted[name]
        fewer = not all_rows and name in vocabulary and stored.shape[:1] < expected[:1]
        if stored.shape[1:] != expected[1:] or not (fewer or stored.shape == expected):
            differences.append(f"{where} has shape {stored.shape}, the model's has {expected}")
        elif stored.dtype not in FLOATS:
            differences.append(f"{where} is {stored.dtype}; quantized weights cannot be trained on")
    if len(rows) > 1:
        differences.append(f"embedding and head have different numbers of rows: {sorted(rows)}")
    return differences


def vocabulary_of(net: Decoder) -> set[str]:
    """Names of the parameters of `net` with a row for each token id: embedding and head."""
    inside = {id(p) for p in net.blocks().parameters()}
    return {
        name
        for name, p in net.named_parameters()
        if id(p) not in inside and p.ndim == 2 and len(p) == net.vocab_size
    }


def load_weights(weights: Weights, net: torch.nn.Module) -> None:
    """Read this rank's shard of each parameter of `net` in place, in the parameter's dtype. Rows of the
    vocabulary that `weights` does not have keep their values. Not collective. check() must have passed."""
    for name, parameter in model_tensors(net).items():
        local, offsets = local_shard(parameter)
        stored = weights.tensors[name]
        ends = [min(o + n, size) for o, n, size in zip(offsets, local.shape, stored.shape)]
        if all(begin < end for begin, end in zip(offsets, ends)):
            region = tuple(slice(begin, end) for begin, end in zip(offsets, ends))
            local[: ends[0] - offsets[0]].copy_(stored.read(region))


def contradictions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `theirs` that differ from `ours`. A field that only one of them has is not compared."""
    return {
        key: theirs[key] for key, value in ours.items() if key in theirs and not _same(value, theirs[key])
    }


def _differences(weights: Weights, net: Decoder, family: ModelFamily) -> str:
    """The fields in which the model of the weights differs from the job's model, and the option that makes
    them equal."""
    job = {key: value for key, value in vars(family.config).items() if key != "max_position"}
    theirs = {key: value for key, value in weights.architecture.items() if key != "vocab_size"}
    rows = [weights.tensors[n].shape[:1] for n in vocabulary_of(net) if n in weights.tensors]
    if (most := max(rows, default=())) > (net.vocab_size,):
        theirs["vocab_size"] = most[0]
    differences = contradictions(job, theirs)
    fields = ", ".join(f"{key} = {json.dumps(value)}" for key, value in differences.items())
    return (
        "; ".join(f"its {key} is {value!r}, the job's {job[key]!r}" for key, value in differences.items())
        + f"; '--model.overrides={{{fields}}}' makes the job's model equal"
    )


def _same(a: Any, b: Any) -> bool:
    numbers = type(a) in (int, float) and type(b) in (int, float)
    return math.isclose(a, b, rel_tol=1e-9) if numbers else a == b


def _have_equal_values(a: LazyTensor, b: LazyTensor | None) -> bool:
    """Whether two tensors have the same values."""
    if b is None or a.shape != b.shape or len(a.shape) != 2:
        return False
    rows = max((64 << 20) // (a.shape[1] * 8), 1)
    begins = range(0, a.shape[0], rows)
    regions = [(slice(i, min(i + rows, a.shape[0])), slice(0, a.shape[1])) for i in begins]
    return all(torch.equal(a.read(r), b.read(r)) for r in regions)


def first_of(differences: Sequence[str]) -> str:
    """The first differences, on one line."""
    more = f" (and {len(differences) - SHOWN} more)" if len(differences) > SHOWN else ""
    return "; ".join(differences[:SHOWN]) + more
