"""Runtime: this process as one rank of a job, with its device, its ranks and its mesh.

A single process needs no process group and makes none.
"""

from __future__ import annotations

import gc
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist

from titanlite.log import set_up_logging
from titanlite.mesh import Mesh, build_mesh
from titanlite.parallelism import Parallelism
from titanlite.ranks import TIMEOUT, Ranks
from titanlite.runtime import hang, process
from titanlite.runtime.environment import (
    is_under_torchrun,
    logs_progress,
    notes_folder,
    place,
    set_library_defaults,
)
from titanlite.runtime.parent import die_with_launcher
from titanlite.runtime.process_group import Comm, init_process_group
from titanlite.runtime.training import BatchLayout, Training, choose_param_dtype
from titanlite.step_clock import StepClock
from titanlite.torch_compat import gloo_flight_record, set_group_timeout


@dataclass(frozen=True)
class Runtime:
    """This process as one rank of the job."""

    device: torch.device
    ranks: Ranks
    mesh: Mesh
    batch: BatchLayout
    param_dtype: torch.dtype
    comm: Comm
    gc_freq: int
    began: float
    """time.perf_counter() at the start of the set-up."""
    clock: StepClock

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    def note_error(self, error: BaseException) -> None:
        """Tell the launcher which error ends this rank, and in which collectives the rank was."""
        if self.world_size > 1:
            ranks = {str(group.group_name): dist.get_process_group_ranks(group) for group in self.mesh.groups}
            hang.write_flight_record(notes_folder(), self.rank, gloo_flight_record(), ranks)
        if isinstance(error, (Exception, SystemExit)):
            process.write_error_note(process.error_note(self.rank), error)

    def synchronize(self) -> None:
        """Wait for the work on the device's current stream, for measuring time. Copies on other streams
        continue."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def collect_garbage(self, step: int) -> None:
        """Run Python's garbage collection if it is due at `step`."""
        if self.gc_freq and step % self.gc_freq == 0:
            gc.collect()

    def first_step_done(self) -> None:
        """Call this after the first step: shorten the timeout of collectives to train_timeout_seconds, and
        exempt all objects that exist now from garbage collection."""
        if self.gc_freq:
            gc.collect()
            gc.freeze()  # later collections visit only new objects and take no time
        timeout = timedelta(seconds=self.comm.train_timeout_seconds)
        for group in self.mesh.groups if self.world_size > 1 else ():
            set_group_timeout(group, timeout)


@contextmanager
def runtime(training: Training, parallelism: Parallelism, comm: Comm, folder: PurePath) -> Iterator[Runtime]:
    """Set this process up, and tear it down on a clean exit. `folder`: the checkpoints that the ranks share.
    Collective.

    After an error nothing is torn down: a rank that waited for its peers in a teardown would only delay the
    message. The launcher ends the other ranks."""
    began, size = time.perf_counter(), process.world_size()
    rank = dist.get_rank() if dist.is_initialized() else place().rank
    set_up_logging(rank, verbose=logs_progress(rank))
    set_library_defaults()
    if is_under_torchrun():
        die_with_launcher()
    batch = BatchLayout.from_training(training, parallelism.degrees(size).data_parallel)
    device = process.pick_device()
    training.check_device(device)
    parallelism.check_machine(device, place().num_local_ranks)
    param_dtype = choose_param_dtype(training, device)
    # FSDP offloads, and rounds otherwise than a single process: then even one process is wrapped in it.
    always, same_bits = training.enable_cpu_offload, training.same_bits_on_any_ranks
    always = always or same_bits
    ours = (size > 1 or always) and not dist.is_initialized()
    if ours:
        init_process_group(device, comm, rank, size)
    mesh = build_mesh(parallelism, device.type, rank, size, always, same_bits)
    clock = StepClock(device, hang.keep_position(notes_folder(), rank))
    timeout = max(TIMEOUT, timedelta(seconds=comm.init_timeout_seconds))
    ranks = Ranks(folder, timeout=timeout, device=device, is_data_leader=mesh.is_data_leader, clock=clock)
    with (
        process.determinism(training.is_deterministic, one_thread=same_bits and device.type == "cpu"),
        process.explicit_garbage_collection(training.gc_freq),
        process.reporting_to_launcher(rank),
    ):
        yield Runtime(device, ranks, mesh, batch, param_dtype, comm, training.gc_freq, began, clock)
    if ours:
        dist.destroy_process_group()
        time.sleep(0.1)  # gloo's worker thread still needs the interpreter's lock once; see leave()


def environment(rt: Runtime) -> dict[str, Any]:
    """Versions and hardware, on which the numbers of a run depend besides its job."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": process.device_name(rt.device),
        "cuda": torch.version.cuda,
        "world_size": rt.world_size,
        "cpu_threads": torch.get_num_threads(),
        "command": sys.argv,
    }
