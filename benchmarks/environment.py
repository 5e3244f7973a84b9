"""What a measurement was made on: hardware, versions and the time."""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment(*packages: str) -> dict[str, Any]:
    """Hardware, the versions of `packages`, and the time."""
    return {
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed(name) for name in packages},
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_result(path: Path, result: dict[str, Any], *packages: str) -> None:
    """A benchmark's raw output, with what it was measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "environment": environment(*packages)}, indent=1) + "\n")


def installed(package: str) -> str:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed: run from the tree"


def cpu_name() -> str:
    """The processor's model, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor()
    )
