"""`titanlite data verify DIR...`: re-hash shards made by `titanlite prepare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from titanlite.data.shards import TokenShards


def main(argv: Sequence[str]) -> int:
    """Print one line a directory; the first that is not what was written ends with exit code 2."""
    parser = argparse.ArgumentParser(prog="titanlite data", description=__doc__)
    parser.add_argument("action", choices=["verify"])
    parser.add_argument("path", type=Path, nargs="+", help="directories with a dataset.json")
    for path in parser.parse_args(argv).path:
        shards = TokenShards(path)
        shards.verify()
        print(
            f"{path}: {shards.num_documents:,} documents, {shards.num_tokens:,} tokens, every byte as written"
        )
    return 0
