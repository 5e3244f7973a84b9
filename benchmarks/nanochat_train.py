"""Runs nanochat's own training script on text from JSON Lines, with a seed, also without its packages:

    NANOCHAT_BASE_DIR=FOLDER python benchmarks/nanochat_train.py CHECKOUT SEED --depth=8 ...

FOLDER has tokenizer/ and base_data_climbmix/, as gpt_quality.py writes them. nanochat's code is not changed:
pyarrow's reader is replaced by one of JSON Lines, rustbpe, wandb, filelock and requests by empty modules if
they are missing, and torch.manual_seed sets SEED in place of nanochat's constant."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GROUP = 1000  # documents that are read at once


@cache  # nanochat opens the file again in each epoch
def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


class JsonLines:
    """The part of pyarrow.parquet.ParquetFile that nanochat uses, for a file of JSON Lines."""

    def __init__(self, path: str):
        lines = _lines(path)
        self.groups = [lines[i : i + GROUP] for i in range(0, len(lines), GROUP)]
        self.num_row_groups = len(self.groups)

    def read_row_group(self, number: int) -> Any:
        texts = [json.loads(line)["text"] for line in self.groups[number]]
        values = ModuleType("values")
        values.to_pylist = lambda: texts  # type: ignore[attr-defined]
        group = ModuleType("group")
        group.column = lambda name: values  # type: ignore[attr-defined]
        return group


def main() -> None:
    checkout, seed, *arguments = sys.argv[1:]
    parquet = ModuleType("pyarrow.parquet")
    parquet.ParquetFile = JsonLines  # type: ignore[attr-defined]
    sys.modules["pyarrow.parquet"] = parquet
    sys.modules["pyarrow"] = ModuleType("pyarrow")
    sys.modules["pyarrow"].parquet = parquet  # type: ignore[attr-defined]
    for name in ("rustbpe", "wandb", "filelock", "requests", "yaml", "jinja2"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].FileLock = sys.modules[name].Template = None  # type: ignore[attr-defined]
    set_seed = torch.manual_seed
    torch.manual_seed = lambda _: set_seed(int(seed))  # type: ignore[assignment]
    sys.path.insert(0, checkout)
    sys.argv = ["base_train", *arguments]
    runpy.run_module("scripts.base_train", run_name="__main__")


if __name__ == "__main__":
    main()
