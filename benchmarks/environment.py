"""The environment of a measurement: hardware, versions and time."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment(*packages: str) -> dict[str, Any]:
    """Return the hardware, the versions of `packages`, and the time."""
    return {
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed(name) for name in packages},
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_result(path: Path, result: dict[str, Any], *packages: str) -> None:
    """Write a benchmark's raw output with its environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "environment": environment(*packages)}, indent=1) + "\n")


def without_paths(text: str, *places: Path | str) -> str:
    """A text without this machine's folders, and without `places`."""
    ours = (Path(__file__).resolve().parents[1], *map(Path, sys.path), Path(sys.prefix))
    for place in (*map(Path, places), *ours):
        text = text.replace(f"{place}/", "") if place.is_absolute() and place != Path("/") else text
    return text


def installed(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed: run from the tree"


def cpu_name() -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor()
    )
