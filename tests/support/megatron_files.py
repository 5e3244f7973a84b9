"""Writes datasets in Megatron's published format, for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    dtype: str = "uint16",
    modes: Sequence[int] | None = None,
) -> str:
    """Write `prefix`.bin and `prefix`.idx. A document is a list of sequences, which are lists of ids."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    width = np.dtype(dtype).itemsize
    pointers = list(accumulate(lengths, initial=0))[: len(lengths)]
    bounds = list(accumulate(map(len, documents), initial=0))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(lengths)}q", *(pointer * width for pointer in pointers))
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    index += b"" if modes is None else bytes(modes)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype=dtype).tobytes() for s in sequences))
    return str(prefix)
