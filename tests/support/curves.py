"""Synthetic metrics of runs: losses with noise of a known kind, and run folders made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.report.estimates import Floats, Series

TOKENS_PER_STEP = 100_000
KINDS = ("normal", "heavy-tailed", "correlated")


def series(values: Sequence[float] | Floats, every: int = 1) -> Series:
    """A series that is logged every so many steps."""
    steps = np.arange(1, len(values) + 1) * every
    return Series(steps, steps * float(TOKENS_PER_STEP), np.asarray(values, np.float64))


def noise_like(kind: str, num: int, seed: int) -> Floats:
    """Noise with about unit variance."""
    rng = np.random.default_rng(seed)
    if kind == "heavy-tailed":
        return rng.standard_t(5, size=num)
    values = rng.normal(size=num + 20)
    for i in range(1, len(values) if kind == "correlated" else 0):
        values[i] += 0.3 * values[i - 1]
    return values[20:]


def flat(num: int) -> Floats:
    """A loss that does not fall."""
    return np.full(num, 3.0)


def falling(num: int) -> Floats:
    """A loss that falls like a power of the number of tokens."""
    return 2 + 4 * np.arange(1.0, num + 1) ** -0.3


def write_run(
    folder: Path, metrics: Mapping[str, Sequence[Any] | Floats], every: int = 1, job: str = ""
) -> Path:
    """Write a run folder with these metrics, one record for every value."""
    folder.mkdir(parents=True, exist_ok=True)
    num = max(len(values) for values in metrics.values())
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for i in range(num):
            step = (i + 1) * every
            record: dict[str, Any] = {"step": step, "progress/total_tokens": step * TOKENS_PER_STEP}
            for key, values in metrics.items():
                if i < len(values) and values[i] is not None:
                    value = values[i]
                    record[key] = value.item() if isinstance(value, np.generic) else value
            file.write(json.dumps(record) + "\n")
    (folder / "job.toml").write_text(job, encoding="utf-8")
    (folder / "env.json").write_text('{"torch": "2.13.0", "device": "NVIDIA H200", "world_size": 8}')
    return folder
