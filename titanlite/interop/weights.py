"""Weights from anywhere, as one thing: named tensors of which any region can be read, whatever the format.

A format (huggingface.py, dcp.py, foreign.py) says which tensors there are and how a chunk of one is loaded;
what is done with them is the same for all: they are compared with a model, read into its parameters on any
layout, or written as a Hugging Face directory (export.py). Names are the model's own, which are Hugging
Face's. No more than a region is held at a time.
"""

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
from titanlite.mesh import local_part
from titanlite.models.base import Decoder, ModelFamily
from titanlite.tokenizers.base import Tokenizer

Region = tuple[slice, ...]  # of a tensor; begin and end along each dim

FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
HEAD = "lm_head.weight"
SHOWN = 3  # of the misfits that one message names


class Chunk(NamedTuple):
    """A part of a tensor that is stored in one piece. `load` reads a region of it, counted from its own
    beginning, to host memory."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    load: Callable[[Region], torch.Tensor]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in files; `file` is one that holds some of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    chunks: Sequence[Chunk]

    def read(self, region: Region) -> torch.Tensor:
        """The region, on the host, in the dtype it is stored in. Raises CheckpointError if the chunks do not
        cover it, or are not what they are said to be."""
        shape = tuple(s.stop - s.start for s in region)
        found, filled = None, 0
        for chunk in self.chunks:
            low = [max(s.start, o) for s, o in zip(region, chunk.offsets)]
            high = [min(s.stop, o + n) for s, o, n in zip(region, chunk.offsets, chunk.shape)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            part = chunk.load(tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets)))
            wanted = tuple(b - a for a, b in zip(low, high))
            if part.dtype != self.dtype or tuple(part.shape) != wanted:
                raise CheckpointError(
                    f"{self.file}: found {part.dtype} of shape {tuple(part.shape)} where {self.dtype} of "
                    f"shape {wanted} was announced"
                )
            if wanted == shape:
                return part
            found = torch.empty(shape, dtype=self.dtype) if found is None else found
            found[tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, region))] = part
            filled += part.numel()
        if found is None or filled != math.prod(shape):
            raise CheckpointError(f"{self.file} does not hold all of a tensor of shape {self.shape}")
        return found

    def row_blocks(self, num_rows: int) -> list[Region]:
        """The first `num_rows` rows, each of them, cut where chunks begin, so that none is loaded twice."""
        begins = sorted({0, *(o for chunk in self.chunks if (o := chunk.offsets[0]) < num_rows)})
        rest = tuple(slice(0, n) for n in self.shape[1:])
        return [(slice(a, b), *rest) for a, b in zip(begins, [*begins[1:], num_rows])]


@dataclass(frozen=True)
class Weights:
    """All tensors of a model, by name. `kind`: the format, for people. `numbers`: what the source says of the
    model, by the fields of the family's config (DecoderConfig.numbers), as far as it does. `tokenizer`: the
    fingerprint of the one it was trained with, if that is recorded."""

    path: Path
    kind: str
    tensors: Mapping[str, LazyTensor]
    numbers: Mapping[str, Any]
    tokenizer: str = ""


class ModelAndTokenizer(NamedTuple):
    """What other programs need to know of a run: its model, and the tokenizer whose ids the first rows of the
    vocabulary are."""

    family: ModelFamily
    tokenizer: Tokenizer


def skeleton(weights: Weights, family: ModelFamily) -> Decoder:
    """The family's model without memory, to compare `weights` with. Raises ConfigError if it cannot be built,
    and for more blocks than `weights` have tensors: a damaged config.json may ask for a million."""
    blocks, tensors = family.config.n_layers, len(weights.tensors)
    if blocks > tensors:
        raise ConfigError(
            f"{weights.path} has {tensors} tensors, too few for the {blocks} layers that are asked for: its "
            "config.json, or the job's [model], is of another model"
        )
    try:
        with torch.device("meta"):
            return family.build()
    except (RuntimeError, TypeError, OverflowError) as e:  # sizes that overflow
        raise ConfigError(f"{weights.path}: a model of its configuration cannot be built: {e}") from None


def check(weights: Weights, family: ModelFamily) -> None:
    """Raises ConfigError unless these are the weights of the family's model: its names and shapes, in a
    floating-point dtype, for the same arithmetic. They may have fewer rows of the vocabulary."""
    net = skeleton(weights, family)
    if contradictions(family.config.numbers(), weights.numbers):
        raise ConfigError(
            f"{weights.path} is of another model than the job's: {_differences(weights, net, family)}"
        )
    found = misfits(weights, net)
    if found:
        raise ConfigError(f"{weights.path} does not fit the job's model: {first_of(found)}")


def check_tokenizer(weights: Weights, tokenizer: Tokenizer, way_out: str) -> None:
    """Raises ConfigError, which ends in `way_out`, if the weights were trained with another tokenizer."""
    if weights.tokenizer not in ("", tokenizer.fingerprint):
        raise ConfigError(f"{weights.path} was trained with another tokenizer than this one; {way_out}")


def misfits(weights: Weights, net: Decoder, all_rows: bool = False) -> list[str]:
    """What keeps `weights` from being all of those of `net`, which is whole; they may have fewer rows of the
    vocabulary, unless it is to be `all_rows`."""
    wanted = {name: tuple(p.shape) for name, p in model_tensors(net).items()}
    vocabulary = vocabulary_of(net)
    missing = [name for name in wanted if name not in weights.tensors]
    found = [f"{name} of shape {wanted[name]} is missing" for name in missing]
    rows = {shape[0] for n in vocabulary & weights.tensors.keys() if (shape := weights.tensors[n].shape)}
    for name, stored in weights.tensors.items():
        where = f"{name} in {stored.file.name}"
        if name not in wanted:
            if name != HEAD or HEAD in vocabulary or len(vocabulary) != 1:
                found.append(f"{where} is unexpected")
            elif not _have_equal_values(stored, weights.tensors.get(next(iter(vocabulary)))):
                found.append(f"{where} differs from the embedding, to which the job's model ties its head")
            continue
        expected = wanted[name]
        fewer = not all_rows and name in vocabulary and stored.shape[:1] < expected[:1]
        if stored.shape[1:] != expected[1:] or not (fewer or stored.shape == expected):
            found.append(f"{where} has shape {stored.shape}, the model's has {expected}")
        elif stored.dtype not in FLOATS:
            found.append(f"{where} is {stored.dtype}; quantized weights cannot be trained on")
    if len(rows) > 1:
        found.append(f"embedding and head have different numbers of rows: {sorted(rows)}")
    return found


def vocabulary_of(net: Decoder) -> set[str]:
    """The parameters of `net` with a row for each id of the vocabulary: embedding and head."""
    inside = {id(p) for p in net.blocks().parameters()}
    return {
        name
        for name, p in net.named_parameters()
        if id(p) not in inside and p.ndim == 2 and len(p) == net.vocab_size
    }


def load_weights(weights: Weights, net: torch.nn.Module) -> None:
    """Read this rank's part of each parameter in place, in the parameter's dtype. Rows that `weights` lack
    keep their values. Not collective; `weights` have been checked."""
    for name, parameter in model_tensors(net).items():
        local, offsets = local_part(parameter)
        stored = weights.tensors[name]
        ends = [min(o + n, size) for o, n, size in zip(offsets, local.shape, stored.shape)]
        if all(begin < end for begin, end in zip(offsets, ends)):
            region = tuple(slice(begin, end) for begin, end in zip(offsets, ends))
            local[: ends[0] - offsets[0]].copy_(stored.read(region))


def contradictions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `theirs`, the numbers of a model, that differ from `ours`; what one of them does not say is
    not compared."""
    return {
        key: theirs[key] for key, value in ours.items() if key in theirs and not _same(value, theirs[key])
    }


def _differences(weights: Weights, net: Decoder, family: ModelFamily) -> str:
    """All fields in which the model of the weights differs from the job's, and the option that makes the
    job's model that one."""
    job = {key: value for key, value in vars(family.config).items() if key != "max_position"}
    theirs = {key: value for key, value in weights.numbers.items() if key != "vocab_size"}
    rows = [weights.tensors[n].shape[:1] for n in vocabulary_of(net) if n in weights.tensors]
    if (most := max(rows, default=())) > (net.vocab_size,):
        theirs["vocab_size"] = most[0]
    found = contradictions(job, theirs)
    fields = ", ".join(f"{key} = {json.dumps(value)}" for key, value in found.items())
    return (
        "; ".join(f"its {key} is {value!r}, the job's {job[key]!r}" for key, value in found.items())
        + f"; '--model.overrides={{{fields}}}' makes the job's model this one"
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


def first_of(found: Sequence[str]) -> str:
    """The first of them, on one line."""
    more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more
