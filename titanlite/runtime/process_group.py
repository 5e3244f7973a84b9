"""`[comm]` and the process group that all ranks of a job share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.component import check_at_least
from titanlite.runtime.environment import (
    connect_on_demand,
    notes_folder,
    num_local_ranks,
    set_flight_recorder_defaults,
    stay_on_this_node,
)


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Communication between ranks."""

    init_timeout_seconds: int = 1800
    """Timeout of collectives until the first step is done. It covers tokenising, loading and compiling."""
    train_timeout_seconds: int = 600
    """Timeout of collectives after the first step. A hang ends the run after this time. A batch that the
    loader's workers do not deliver ends the run after nine tenths of it, and names the worker."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "init_timeout_seconds", "train_timeout_seconds")


def init_process_group(device: torch.device, comm: Comm, rank: int, num_ranks: int) -> None:
    """Make the default process group: NCCL for CUDA tensors, gloo for CPU tensors. Ranks that are all on one
    node open no port to the network."""
    set_flight_recorder_defaults()
    connect_on_demand(num_ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    rendezvous: dict[str, Any] = {}
    if num_ranks == num_local_ranks():
        stay_on_this_node()
        store = _store_on_this_node(num_ranks)
        if store is not None:
            store.set_timeout(timeout)
            rendezvous = {"store": store, "rank": rank, "world_size": num_ranks}
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timeout, device_id=device_id, **rendezvous)


def _store_on_this_node(num_ranks: int) -> Any:
    """The store over which ranks on one node meet: in memory for one rank, else a file in the launcher's
    folder. None under another launcher, which has a store of its own."""
    if num_ranks == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if folder := notes_folder():
        return dist.FileStore(os.path.join(folder, "store"), num_ranks)  # type: ignore[attr-defined]
    return None
