"""This process: its device, its garbage collection and its end."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch
import torch.distributed as dist

from titanlite.config.component import ConfigError
from titanlite.runtime.environment import notes_folder, place, set_deterministic_defaults
from titanlite.runtime.signals import was_told_to_end


def world_size() -> int:
    """Number of ranks of this job."""
    return dist.get_world_size() if dist.is_initialized() else place().num_ranks


def pick_device() -> torch.device:
    """This rank's CUDA device, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        here, gpus = place(), torch.cuda.device_count()
        processes = max(here.num_local_ranks, here.local_rank + 1)
        if processes > gpus:
            raise ConfigError(f"{processes} processes on this node, which has {gpus} GPUs; lower NGPU")
        device = torch.device("cuda", here.local_rank)
        torch.cuda.set_device(device)
        return device
    if torch.backends.mps.is_available() and world_size() == 1:
        return torch.device("mps")
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The device's name, as the vendor's driver gives it."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else (platform.processor() or platform.machine())
    )


def leave(code: int) -> NoReturn:
    """End the process at once with `code`.

    An interpreter that finalises while gloo's threads run can abort a finished run (pytorch issue 179291), so
    a distributed process skips finalisation. Close writers and loaders before.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader of a pipe may be gone
            stream.flush()
    with suppress(ConfigError):
        if code == 1 and world_size() > 1 and not was_told_to_end():
            # Another rank probably failed first. The launcher, when it has seen this, ends this rank.
            time.sleep(2)
    os._exit(code)


def error_note(rank: int) -> str:
    """Path of the file in which `rank` tells the launcher why it ended; /dev/null without a launcher."""
    folder = notes_folder()
    return os.path.join(folder, f"rank-{rank}") if folder else os.devnull


def write_error_note(note: str, error: BaseException) -> None:
    """Write `error` into the error note at path `note`. A disk that does not take it is ignored."""
    with suppress(OSError), open(note, "w", encoding="utf-8", errors="backslashreplace") as f:
        f.write(f"{type(error).__name__}: {error}")


@contextmanager
def reporting_to_launcher(rank: int) -> Iterator[None]:
    """Delete this rank's error note, which the launcher has made, when the body is done, and write an error
    of the body into it. The note of a rank that leaves without either tells the launcher that the rank
    crashed."""
    folder, note = notes_folder(), error_note(rank)
    try:
        yield
    except (Exception, SystemExit) as error:
        write_error_note(note, error)
        raise
    if folder:
        with suppress(OSError):
            os.unlink(note)


@contextmanager
def explicit_garbage_collection(gc_freq: int) -> Iterator[None]:
    """Switch Python's automatic garbage collection off in the body, unless `gc_freq` is 0; Runtime collects
    every `gc_freq` steps instead."""
    was_enabled = gc.isenabled()
    if gc_freq:
        gc.disable()
        if torch.cuda.is_initialized():
            gc.collect()  # objects left by an earlier run in this process may hold GPU memory
        gc.freeze()  # a collection that visits all imported modules takes 0.3 s
    try:
        yield
    finally:
        if gc_freq:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def determinism(on: bool, one_thread: bool = False) -> Iterator[None]:
    """In the body, torch and its compiler choose deterministic kernels only, if `on`; otherwise what the user
    has chosen stays. `one_thread`: on a CPU, sums depend on the number of threads."""
    torch.backends.cudnn.benchmark = False
    if not on:
        yield
        return
    set_deterministic_defaults()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    num_threads = torch.get_num_threads()
    if one_thread:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        if one_thread:
            torch.set_num_threads(num_threads)
