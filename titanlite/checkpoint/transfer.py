"""Files of a checkpoint on their way from the memory of one node to that of another, over gloo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite.checkpoint.digest import FileDigest, HashingFile
from titanlite.ranks import Ranks

BLOCK_BYTES = 16 << 20


class Transfer(NamedTuple):
    """Files that go to or come from another rank."""

    rank: int
    files: Mapping[str, FileDigest]


class _Block(NamedTuple):
    name: str
    start: int
    size: int
    is_last: bool


def exchange_files(
    folder: Path, ranks: Ranks, sends: Transfer | None, receives: Transfer | None
) -> str | None:
    """Send files of `folder` and receive others into it at the same time. Returns the reason if this rank has
    not received its files as they were written; an error of the sender is one of them. Each of the other
    ranks must call this with its side of the same transfers, in the same order."""
    problem: str | None = None
    file: HashingFile | None = None
    for out, into in zip_longest(_blocks(sends), _blocks(receives)):
        outgoing = _read(folder, out) if out and out.size else None
        incoming = torch.empty(into.size, dtype=torch.uint8) if into and into.size else None
        ranks.exchange(outgoing, sends.rank if sends else 0, incoming, receives.rank if receives else 0)
        if into is None or problem is not None:
            continue
        try:
            if into.start == 0:
                path = folder / f".incoming-{into.name}"
                path.unlink(missing_ok=True)  # left by a start that was killed
                file = HashingFile(path)
            assert file is not None
            if incoming is not None:
                file.write(incoming.numpy().data)
            if into.is_last:
                file.close()
                assert receives is not None
                if file.digest() != receives.files[into.name]:
                    problem = f"{into.name} from rank {receives.rank} is not what was written"
                else:
                    Path(file.path).rename(folder / into.name)
        except OSError as e:
            problem = f"rank {ranks.rank}: {type(e).__name__}: {e}"
    if problem is not None and file is not None:
        with suppress(OSError):
            Path(file.path).unlink()
    return problem


def _blocks(transfer: Transfer | None) -> Iterator[_Block]:
    for name, digest in (transfer.files if transfer else {}).items():
        for start in range(0, max(digest.size, 1), BLOCK_BYTES):
            size = min(BLOCK_BYTES, digest.size - start)
            yield _Block(name, start, size, start + size == digest.size)


def _read(folder: Path, block: _Block) -> torch.Tensor:
    """The bytes of a block. Bytes that cannot be read are zero, and the receiver refuses the file: it waits
    for something."""
    data = torch.zeros(block.size, dtype=torch.uint8)
    with suppress(OSError), open(folder / block.name, "rb", buffering=0) as file:
        file.seek(block.start)
        file.readinto(data.numpy().data)
    return data
