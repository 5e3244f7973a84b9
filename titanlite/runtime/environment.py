"""Environment variables: the only module of titanlite that reads or sets them.

A variable that the user has set is left alone; an empty one counts as not set. The module imports no torch,
because OpenMP reads its variables while torch is imported.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from titanlite.config.component import ConfigError

LAUNCHER_PID = "TITANLITE_LAUNCHER_PID"
_TUNE_PID = "TITANLITE_TUNE_PID"
NOTES = "TITANLITE_NOTES"
_RESTART_BEGAN = "TITANLITE_RESTART_BEGAN"
MAX_CONNECTED = 256  # ranks that gloo connects with each other at the start


class Place(NamedTuple):
    """The rank of this process among all processes of the job, and its local rank among those on its node."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1


def place() -> Place:
    """This process's place among the ranks, as a launcher sets it. Without WORLD_SIZE, or if it is 1, the
    process is the only one of its job: schedulers and other programs leave RANK and LOCAL_RANK behind. Raises
    ConfigError if the variables do not fit together."""
    num_ranks = _number("WORLD_SIZE", 1, 1)
    if num_ranks == 1:
        return Place()
    num_local_ranks = _number("LOCAL_WORLD_SIZE", 1, 1, num_ranks)
    most = num_local_ranks - 1 if os.environ.get("LOCAL_WORLD_SIZE") else num_ranks - 1
    return Place(
        _number("RANK", None, 0, num_ranks - 1), num_ranks, _number("LOCAL_RANK", 0, 0, most), num_local_ranks
    )


def _number(name: str, default: int | None, least: int, most: int | None = None) -> int:
    """The number in a variable that a launcher sets. `default`: if it is not set; None: it must be."""
    text = os.environ.get(name)
    if not text and default is not None:
        return default
    if text and text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    expected = f">= {least}" if most is None else f"from {least} to {most}"
    sizes = (size for size in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if size != name and size in os.environ)
    because = "".join(f", {size}={os.environ[size]}" for size in sizes)
    given = f"{name}={text}" if text else f"{name} is not set"
    raise ConfigError(
        f"{given}{because}: expected an integer {expected}. `titanlite launch` and torchrun set "
        "these variables; for a single process, unset WORLD_SIZE"
    )


def is_first_local_rank() -> bool:
    """Whether this is the first rank of its node, which reports errors that all ranks have."""
    try:
        return place().local_rank == 0
    except ConfigError:  # it is the error
        return True


def store_address() -> tuple[str, int, bool]:
    """Host and port of the store over which the ranks meet, and whether rank 0 is to open it; under torchrun,
    its agent has done so. Raises ConfigError."""
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", None, 1, 65535)
    try:
        if not host:
            raise OSError("not set")
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"MASTER_ADDR={host}: {e}; expected the host of rank 0") from None
    return host, port, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def logs_progress(rank: int) -> bool:
    """Whether `rank` logs progress and not only warnings: the ranks listed in LOG_RANK, by default rank 0."""
    return str(rank) in os.environ.get("LOG_RANK", "0").split(",")


def is_under_torchrun() -> bool:
    """Whether torchrun, or titanlite's launcher on top of it, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_pid() -> int | None:
    """Process id of titanlite's launcher; None if another program started this process."""
    pid = os.environ.get(LAUNCHER_PID)
    return int(pid) if pid else None


def notes_folder() -> str | None:
    """Folder made by the launcher in which the ranks of one start meet and leave error notes; None without
    titanlite's launcher."""
    return os.environ.get(NOTES) or None


@contextmanager
def asking_nvml() -> Iterator[None]:
    """In the body, torch finds out by NVML whether there are GPUs: after a question to CUDA, a process that
    is forked from this one could not use CUDA. What modules of the body set in the environment is forgotten,
    such as a compile cache, which would count as the user's choice."""
    before = dict(os.environ)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Called by a rank that was forked: its environment is the one that the launcher has for it."""
    os.environ.clear()
    os.environ.update(environment)


def set_notes_folder(folder: str) -> None:
    """Called by the launcher: the notes folder of the ranks that it starts next."""
    os.environ[NOTES] = folder


def set_restart_began(seconds: float) -> None:
    """Called by the launcher: time.monotonic() when it saw the failure after which it starts ranks again."""
    os.environ[_RESTART_BEGAN] = str(seconds)


def restart_began() -> float | None:
    """time.monotonic() when this rank's launcher saw the failure after which it has started this rank; None
    at the first start. The clock is one for all processes of a machine."""
    seconds = os.environ.get(_RESTART_BEGAN)
    return float(seconds) if seconds else None


def shared_memory() -> Path:
    """The root of the shared memory of this node, in which copies of the state outlive the ranks."""
    return Path(os.environ.get("TITANLITE_SHM") or "/dev/shm")


def flight_record_prefix(folder: str) -> str:
    """Path, without the rank at its end, to which NCCL writes its flight record when a collective times out:
    the user's TORCH_FR_DUMP_TEMP_FILE, else in the launcher's `folder`."""
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.path.join(folder, "nccl-")


def set_flight_recorder_defaults() -> None:
    """Let NCCL keep the last 2000 collectives, torch 2.13's default, and write them to a file at a timeout.
    Call this before a process group is made."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    folder = notes_folder()
    if folder and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # the variable's older name
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = flight_record_prefix(folder)


def set_thread_defaults() -> None:
    """Let idle OpenMP threads sleep after a short wait. Call this before torch is imported.

    libgomp, which torch uses on Linux, otherwise lets idle threads spin for milliseconds. When other
    processes run too, the spinning threads take the cores from the threads that they wait for
    (benchmarks/threads.py).
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def set_library_defaults() -> None:
    """Set what torch and torchao read from the environment. Call this before CUDA is used."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the variable's older name
        # Activations of many sizes leave gaps between segments that cannot grow.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torchao's compiled extensions are for inference and for one version of torch: loading them fails with a
    # long warning.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")


def set_deterministic_defaults() -> None:
    """Give cuBLAS the fixed workspace without which torch refuses deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def user_cache() -> Path:
    """The folder for what programs of this user keep and can make again; may begin with `~`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def compile_cache_of_user() -> str | None:
    """The folder in which torch's compiler keeps its code, if the user has chosen one."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or None


def set_compile_cache(folder: str) -> None:
    """Let torch's compiler keep its code in this folder. Call this before the first compilation."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def stay_on_this_node() -> None:
    """Make gloo and NCCL listen on the loopback interface only, so that the network cannot reach them. Call
    this before a process group is made, when all ranks are on one node."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in {"lo", "lo0"} & names:  # Linux, macOS
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def check_interfaces() -> None:
    """Raises ConfigError if gloo is to listen on a network interface that this machine lacks."""
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in known:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={name}: this machine has no such network interface (known: "
                f"{', '.join(known)})"
            )


def connect_on_demand(num_ranks: int) -> None:
    """Make gloo connect two ranks when they first talk, if there are many ranks. Otherwise every rank
    connects to all others in every group of all ranks: at 513 ranks, two such groups need 1,024 sockets, a
    usual limit of a process. Call this before a process group is made."""
    if num_ranks > MAX_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def visible_gpus(count: int) -> list[str]:
    """The ids of this process's `count` GPUs, as CUDA_VISIBLE_DEVICES has them."""
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ids if len(ids) == count else [str(i) for i in range(count)]


def environment_of_run(ids: str) -> dict[str, str]:
    """The environment of a run that `titanlite tune`, this process, starts: the run sees only these GPUs,
    without ids this process's own, and learns this process's id."""
    gpus = {"CUDA_VISIBLE_DEVICES": ids} if ids else {}
    return os.environ | gpus | {_TUNE_PID: str(os.getpid())}


def take_tune_pid() -> int | None:
    """Process id of the `titanlite tune` that started this process; None if another program did. The
    processes that this one starts do not get it."""
    pid = os.environ.pop(_TUNE_PID, None)
    return int(pid) if pid else None


def prepare_to_launch(num_ranks: int) -> None:
    """Called by the launcher of `num_ranks` ranks: tell them its process id, give each restart a store of its
    own, and, if the user has not set the number of OpenMP threads, give each of several ranks one, as
    torchrun does.

    torchrun's shared store still has the addresses of ranks that died, and a new gloo group may wait for them
    forever (seen with torch 2.13).
    """
    set_library_defaults()
    # torch's C++ code warns of things that are not the user's doing: gloo groups without options, files that
    # time a trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[LAUNCHER_PID] = str(os.getpid())
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
