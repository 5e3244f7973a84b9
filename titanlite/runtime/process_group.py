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
    check_interfaces,
    connect_on_demand,
    notes_folder,
    place,
    set_flight_recorder_defaults,
    stay_on_this_node,
    store_address,
)


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Communication between ranks."""

    init_timeout_seconds: int = 1800
    """Timeout of collectives until the first step is done, with tokenising, loading and compiling."""
    train_timeout_seconds: int = 600
    """Timeout of collectives after the first step, which ends a hang. A batch that is not delivered in nine
    tenths of it ends the run, too."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "init_timeout_seconds", "train_timeout_seconds")


def init_process_group(device: torch.device, comm: Comm, rank: int, num_ranks: int) -> None:
    """Make the default process group: NCCL for CUDA tensors, gloo for CPU tensors. Ranks that are all on one
    node open no port to the network. Raises ConfigError for a network interface or an address of rank 0 that
    does not exist, and NotReached if rank 0 does not open its port in time."""
    check_interfaces()
    set_flight_recorder_defaults()
    connect_on_demand(num_ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    rendezvous: dict[str, Any] = {}
    if num_ranks == place().num_local_ranks:
        stay_on_this_node()
        store = _store_on_this_node(num_ranks)
        if store is not None:
            store.set_timeout(timeout)
            rendezvous = {"store": store, "rank": rank, "world_size": num_ranks}
    if not rendezvous:
        _wait_for_store(rank, comm)
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timeout, device_id=device_id, **rendezvous)


def _wait_for_store(rank: int, comm: Comm) -> None:
    """Wait until the store of all ranks can be reached. During torch's own wait, signals have no effect."""
    from titanlite.runtime.rendezvous import told_when_long, wait_for

    host, port, rank_zero_opens = store_address()
    if rank > 0 or not rank_zero_opens:
        with told_when_long(f"waiting for rank 0 at {host}:{port}"):
            wait_for(host, port, comm.init_timeout_seconds, f"rank 0 does not answer at {host}:{port}")


def _store_on_this_node(num_ranks: int) -> Any:
    """The store over which ranks on one node meet: in memory for one rank, else a file in the launcher's
    folder. None under another launcher, which opens a store itself."""
    if num_ranks == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if folder := notes_folder():
        return dist.FileStore(os.path.join(folder, "store"), num_ranks)  # type: ignore[attr-defined]
    return None
