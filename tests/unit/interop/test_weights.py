"""Any region of a tensor is read from whatever chunks it is stored in, and nothing is made up where they do
not cover it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titanlite.checkpoint.commit import CheckpointError
from titanlite.interop.weights import Chunk, LazyTensor, Region, contradictions, joined, shape_at
from titanlite.models.base import Index
from titanlite.models.llama3 import Llama3

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
ROWS, COLUMNS = (0, 3, 4, 7), (0, 2, 6)


def stored(
    leave_out: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[LazyTensor, list[Region]]:
    """WHOLE in uneven chunks along both dims, and what of them is loaded."""
    loaded: list[Region] = []
    chunks = []
    for (a, b), (c, d) in itertools.product(itertools.pairwise(ROWS), itertools.pairwise(COLUMNS)):
        part = WHOLE[a:b, c:d]

        def load(region: Region, part: torch.Tensor = part) -> torch.Tensor:
            loaded.append(region)
            return part[region]

        chunks.append(Chunk((a, c), tuple(part.shape), load))
    if leave_out is not None:
        del chunks[leave_out]
    return LazyTensor((7, 6), dtype, Path("some.file"), chunks), loaded


def test_every_region_is_read() -> None:
    tensor, _ = stored()
    for a, b in itertools.combinations(range(8), 2):
        for c, d in itertools.combinations(range(7), 2):
            assert torch.equal(tensor.read((slice(a, b), slice(c, d))), WHOLE[a:b, c:d])


def test_a_chunk_is_loaded_once_when_all_rows_are() -> None:
    tensor, loaded = stored()
    assert torch.equal(torch.cat([tensor.read(band) for band in tensor.row_blocks()]), WHOLE)
    assert len(loaded) == 2 * len(ROWS[:-1])


@pytest.mark.parametrize("missing", range(6))
def test_what_is_not_there_is_not_made_up(missing: int) -> None:
    tensor, _ = stored(leave_out=missing)
    with pytest.raises(CheckpointError, match=r"some\.file does not hold all of"):
        tensor.read((slice(0, 7), slice(0, 6)))


def test_rows_before_the_first_chunk_are_missed() -> None:
    tensor, _ = stored()
    lower = replace(tensor, chunks=[chunk for chunk in tensor.chunks if chunk.offsets[0]])
    with pytest.raises(CheckpointError, match=r"some\.file does not hold all of"):
        [lower.read(band) for band in lower.row_blocks()]


def test_a_chunk_that_is_not_what_it_is_said_to_be() -> None:
    tensor, _ = stored(dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"a block is torch\.float32 .*bfloat16"):
        tensor.read((slice(0, 7), slice(0, 6)))


EXPERTS = torch.arange(6 * 4 * 3).reshape(6, 4, 3)


def test_a_parameter_of_one_tensor_per_expert() -> None:
    loaded: list[tuple[int, int]] = []

    def part(n: int, begin: int) -> tuple[LazyTensor, Index]:
        index = (n, slice(begin, begin + 2))

        def load(region: Region) -> torch.Tensor:
            loaded.append((n, begin))
            return EXPERTS[index][region]

        assert shape_at(index, EXPERTS.shape) == (2, 3)
        return LazyTensor((2, 3), torch.int64, Path("some.file"), [Chunk((0, 0), (2, 3), load)]), index

    tensor = joined([part(n, begin) for n in reversed(range(6)) for begin in (0, 2)], (6, 4, 3))
    for a, b in itertools.combinations(range(7), 2):
        for c, d in itertools.combinations(range(5), 2):
            loaded.clear()
            assert torch.equal(tensor.read((slice(a, b), slice(c, d), slice(1, 3))), EXPERTS[a:b, c:d, 1:])
            touched = {begin for begin in (0, 2) if begin < d and begin + 2 > c}
            assert sorted(loaded) == sorted(itertools.product(range(a, b), touched))  # no other expert's
    assert [block[0] for block in tensor.row_blocks()] == [tensor.block_at(n) for n in range(6)]
    with pytest.raises(CheckpointError, match=r"some\.file does not hold all of"):
        joined([part(n, begin) for n in range(6) for begin in (0, 2)][:-1], (6, 4, 3)).read(
            (slice(0, 6), slice(0, 4), slice(0, 3))
        )


def test_what_is_not_said_is_no_contradiction() -> None:
    ours = Llama3(flavor="8B").config.architecture_fields()
    assert contradictions(ours, {}) == {}
    assert contradictions(ours, {"dim": 4096, "vocab_size": 3}) == {}
    assert contradictions(ours, {"dim": 8}) == {"dim": 8}


def test_bands_of_a_rope_that_is_not_scaled_are_no_contradiction() -> None:
    scaled = Llama3(flavor="8B").config.architecture_fields()
    plain = Llama3(
        flavor="8B", overrides={"rope_factor": 1.0, "rope_high_freq_factor": 3.0}
    ).config.architecture_fields()
    assert contradictions(scaled, plain) == {"rope_factor": 1.0}
