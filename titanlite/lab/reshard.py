"""The decision of a run whether FSDP frees gathered weights after the forward, by the memory of its GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from titanlite.lab.memory import reshard_choice
from titanlite.lab.planned import PlannedRun
from titanlite.log import logger
from titanlite.parallelism import Parallelism
from titanlite.runtime.runtime import Runtime


def resolve_reshard(
    parallelism: Parallelism, rt: Runtime, make_run: Callable[[int], PlannedRun]
) -> Parallelism:
    """`parallelism` with "always" or "never" for a fsdp_reshard_after_forward of "default", and a line in the
    log. Unchanged on a CPU and without FSDP. `make_run`: the planned run for GPUs with so many bytes of
    memory. Collective: all ranks decide by the memory of the smallest GPU."""
    is_sharded_on_gpus = rt.device.type == "cuda" and rt.mesh.device_mesh is not None
    if parallelism.fsdp_reshard_after_forward != "default" or not is_sharded_on_gpus:
        return parallelism
    frees, reason = reshard_choice(make_run(rt.smallest_memory()))
    action = (
        "frees gathered weights after the forward" if frees else "keeps gathered weights for the backward"
    )
    logger.info(f"FSDP {action}: {reason}")
    return replace(parallelism, fsdp_reshard_after_forward="always" if frees else "never")
