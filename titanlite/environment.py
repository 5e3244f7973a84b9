"""Environment variables that titanlite sets for libraries. A variable that the user has set is left alone.

Imports no torch, because OpenMP reads its variables while torch is imported. runtime.py reads what a launcher
says; nothing else in titanlite uses the environment.
"""

from __future__ import annotations

import os
import socket

LAUNCHER = "TITANLITE_LAUNCHER_PID"
NOTES = "TITANLITE_NOTES"  # a folder of the launcher's, where the ranks of one start meet and leave notes


def set_thread_defaults() -> None:
    """OpenMP's threads sleep while they have nothing to do, after a short wait. Those of libgomp, which torch
    uses on Linux, otherwise compute in a loop for milliseconds, and take the cores from the threads that they
    wait for when other processes run, too (benchmarks/threads.py). Call this before torch is imported."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def set_library_defaults() -> None:
    """Settings of torch and torchao; before CUDA is used."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        # activations of many sizes leave gaps between segments that cannot grow
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torchao's compiled extensions are for inference and for one version of torch: loading them fails, loudly
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")


def stay_on_this_node() -> None:
    """Gloo and NCCL listen on the loopback interface only, so that the network cannot reach them; before a
    process group is made. For ranks that are all on one node."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in {"lo", "lo0"} & names:  # Linux, macOS
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def prepare_to_launch() -> None:
    """For the launcher: let ranks know it, and give each restart a store of its own. torchrun's shared one
    still has the addresses of the ranks that died, and a new gloo group may wait for them forever (seen with
    torch 2.13)."""
    set_library_defaults()
    # what torch's C++ warns of is not the user's doing: gloo groups without options, files that time a trace
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[LAUNCHER] = str(os.getpid())


def set_notes_folder(folder: str) -> None:
    """For the launcher: where the ranks that it starts next meet and leave their notes."""
    os.environ[NOTES] = folder
