"""What a process needs before it can train: device, process groups, mesh, seeds, the plan of a step -- and a
clean exit.

The only module that reads the environment, and the home of the collectives that the loop itself uses. A
single process needs no process group and makes none.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from titanlite.config.component import ConfigError
from titanlite.environment import LAUNCHER, NOTES, set_library_defaults, stay_on_this_node
from titanlite.host_copy import HostCopy
from titanlite.log import set_up_logging
from titanlite.mesh import Mesh, Parallelism, build_mesh


@dataclass(frozen=True, kw_only=True)
class Training:
    """The step: its size, its number, its precision, its seed."""

    seq_len: int = 2048
    """Targets a row; a row is seq_len + 1 tokens."""
    local_batch_size: int = 8
    """Rows of one micro-batch of one rank: what has to fit into memory at once."""
    global_batch_size: int = -1
    """Rows of one optimizer step over all ranks; what exceeds local_batch_size x ranks is accumulated. -1:
    that product."""
    steps: int = 10000
    """Optimizer steps until the run is done."""
    max_norm: float = 1.0
    """Gradients are scaled down to this total norm; 0: never."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Only deterministic kernels: bit-identical reruns on the same layout, at some cost in speed."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """dtype of parameters and activations in forward and backward (the optimizer's copy is fp32). auto:
    bfloat16 on CUDA, float32 elsewhere."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """dtype in which gradients are summed over ranks. bfloat16 halves the traffic; micro-batches still add up
    in fp32, for which each is reduced at once (as with parallelism.fsdp_reduce = "micro_batch")."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory, and let the CPU take the optimizer's
    step: for a model that the GPUs cannot hold. Slow."""
    gc_freq: int = 50
    """Collect Python's garbage every so many steps, on all ranks in the same one: a rank that does it in its
    own time holds up the others. 0: each in its own time."""

    def __post_init__(self) -> None:
        if self.gc_freq < 0:
            raise ConfigError(f"{self.gc_freq} is below 0", "gc_freq")
        for key in ("seq_len", "local_batch_size", "steps"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is below 1", key)
        if self.local_batch_size * self.seq_len >= 1 << 31:
            raise ConfigError(
                f"{self.local_batch_size} sequences of {self.seq_len} tokens are 2^31 tokens or more, too "
                "many for one micro-batch; set global_batch_size to accumulate a larger batch",
                "local_batch_size",
            )
        if self.global_batch_size < 1 and self.global_batch_size != -1:
            raise ConfigError(f"{self.global_batch_size} is neither -1 nor at least 1", "global_batch_size")
        if not self.max_norm >= 0:
            raise ConfigError(f"{self.max_norm} is not 0 or above", "max_norm")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"{self.seed} is not in [0, 2^63)", "seed")


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Communication between ranks."""

    init_timeout_seconds: int = 1800
    """How long a rank waits for the others until the first step is done: tokenising, loading, compiling."""
    train_timeout_seconds: int = 600
    """Timeout of collectives after the first step. A hang ends the run after this time; a batch that the
    loader's workers do not give ends it after nine tenths, with the worker's name."""

    def __post_init__(self) -> None:
        for key in ("init_timeout_seconds", "train_timeout_seconds"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{getattr(self, key)} is below 1", key)


@dataclass(frozen=True)
class StepPlan:
    """How one optimizer step is cut: `rows` = micro_batches x micro_batch_rows x data-parallel ranks."""

    rows: int
    micro_batch_rows: int
    micro_batches: int
    tokens: int

    @classmethod
    def of(cls, training: Training, dp_size: int) -> StepPlan:
        """Raises ConfigError if the global batch does not divide."""
        at_once = training.local_batch_size * dp_size
        rows = at_once if training.global_batch_size == -1 else training.global_batch_size
        if rows % at_once:
            nearest = sorted({max(rows // at_once, 1) * at_once, (rows // at_once + 1) * at_once})
            raise ConfigError(
                f"{rows} rows are no multiple of local_batch_size {training.local_batch_size} x {dp_size} "
                f"ranks = {at_once}; the nearest: {' or '.join(str(n) for n in nearest)}",
                "training.global_batch_size",
            )
        if rows * training.seq_len * training.steps >= 1 << 63:
            raise ConfigError(
                f"{training.steps} steps of {rows} x {training.seq_len} tokens are 2^63 tokens or more, "
                "which cannot be counted",
                "training.steps",
            )
        return cls(rows, training.local_batch_size, rows // at_once, rows * training.seq_len)


@dataclass(frozen=True)
class Runtime:
    """This process among its peers."""

    device: torch.device
    rank: int
    world_size: int
    mesh: Mesh
    plan: StepPlan
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    comm: Comm
    gc_freq: int
    began: float
    """When this run's set-up began, by time.perf_counter()."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """`value` summed over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def sum_scalars(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """fp32 scalars, each summed over all ranks, in one all-reduce."""
        on_device = [value.to(self.device, torch.float32) for value in values]
        return list(self.sum(torch.stack(on_device)))

    def sum_u64(self, value: int) -> str:
        """The sum mod 2^64 of an unsigned integer over the data-parallel ranks, as 16 hex digits."""
        value = value if self.mesh.leads else 0
        signed = (value + (1 << 63)) % (1 << 64) - (1 << 63)  # int64 addition wraps, which is what is wanted
        total = self.sum(torch.tensor(signed, dtype=torch.int64, device=self.device))
        return f"{total.item() % (1 << 64):016x}"

    def count(self, number: int) -> torch.Tensor:
        """The sum of an integer over the data-parallel ranks, int64 on the device; no host sync."""
        number = number if self.mesh.leads else 0
        return self.sum(torch.full((), number, dtype=torch.int64, device=self.device))

    def vote(self, *flags: bool) -> Vote:
        """Ask every rank; the answer to each flag is whether any rank says so."""
        return Vote(flags, self.device, self.world_size)

    def check_equal(self, what: str, value: str) -> None:
        """Raises ConfigError on every rank if `value` differs between ranks."""
        values: list[Any] = [None] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
            different = [r for r, v in enumerate(values) if v != values[0]]
            if different:
                other = different[0]
                raise ConfigError(
                    f"rank {other} has another {what} than rank 0: {values[other]}, {values[0]}"
                )

    @contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Rank 0 runs the body before the other ranks, which find the files that it writes. An error of rank
        0 that has an exit code is raised on every rank."""
        error: list[Any] = [None]
        if self.world_size > 1 and self.rank > 0:
            dist.broadcast_object_list(error, src=0)
            if error[0] is not None:
                raise error[0]
        try:
            yield
        except BaseException as e:
            if isinstance(e, Exception):
                error = [
                    e
                    if isinstance(e, (ConfigError, OSError)) or hasattr(e, "exit_code")
                    else RuntimeError(f"rank 0: {type(e).__name__}: {e}")
                ]
            with suppress(RuntimeError):  # of peers that are gone: a stop was for them, too
                self._tell(error)
            raise
        self._tell(error)

    def note_error(self, error: BaseException) -> None:
        """Tell the launcher now what ends this rank."""
        if isinstance(error, (Exception, SystemExit)):
            _write_note(_note_of(self.rank), error)

    def _tell(self, error: list[Any]) -> None:
        """From rank 0 to the others."""
        if self.world_size > 1 and self.rank == 0:
            dist.broadcast_object_list(error, src=0)

    def synchronize(self) -> None:
        """Wait for the device's work, not for copies beside it: for clocks."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def collect_garbage(self, step: int) -> None:
        """When it is due."""
        if self.gc_freq and step % self.gc_freq == 0:
            gc.collect()

    def first_step_done(self) -> None:
        """From here on, a collective that takes long is a hang, and what is there stays."""
        if self.gc_freq:
            gc.collect()
            gc.freeze()  # so that a collection looks only at what is new, and takes no time
        if self.world_size == 1:
            return
        assert self.mesh.device_mesh is not None
        timeout = timedelta(seconds=self.comm.train_timeout_seconds)
        for group in (None, *self.mesh.device_mesh.get_all_groups()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


class Vote:
    """Flags on their way to all ranks. Sent when it is made and read later, so that no rank waits: on CUDA
    the device has then long passed the all-reduce."""

    def __init__(self, flags: Sequence[bool], device: torch.device, world_size: int):
        votes = torch.tensor(flags, dtype=torch.int32)
        if world_size > 1:
            if device.type == "cuda":
                votes = votes.pin_memory().to(device, non_blocking=True)
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        self._votes = HostCopy(votes)

    def result(self) -> list[bool]:
        """The same on all ranks."""
        return [bool(vote) for vote in self._votes.result()]


def world_size() -> int:
    """Ranks of this job, as the launcher says."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Which of this node's processes this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def runtime(training: Training, parallelism: Parallelism, comm: Comm) -> Iterator[Runtime]:
    """Set the process up, and tear it down on a clean exit. On an error the peers are left to the launcher: a
    rank that waits for them in a teardown would only hide the message."""
    began, rank, size = time.perf_counter(), int(os.environ.get("RANK", "0")), world_size()
    if dist.is_initialized():
        rank = dist.get_rank()
    set_up_logging(rank, verbose=str(rank) in os.environ.get("LOG_RANK", "0").split(","))
    set_library_defaults()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with_the_launcher()
    plan = StepPlan.of(training, parallelism.degrees(size).data_parallel)
    device = pick_device()
    param_dtype = choose_param_dtype(training, device)
    offload = training.enable_cpu_offload  # by FSDP, also of one process
    ours = (size > 1 or offload) and not dist.is_initialized()
    if ours:
        _init_process_group(device, comm, rank, size)
    _set_determinism(training.deterministic)
    mesh = build_mesh(parallelism, device.type, rank, size, always=offload)
    reduce_dtype = getattr(torch, training.mixed_precision_reduce)
    with _collecting_only_when_due(training.gc_freq), _note_for_the_launcher(rank):
        yield Runtime(
            device, rank, size, mesh, plan, param_dtype, reduce_dtype, comm, training.gc_freq, began
        )
    _set_determinism(False)
    if ours:
        dist.destroy_process_group()
        time.sleep(0.1)  # gloo's worker thread still needs the interpreter's lock once; see leave()


def pick_device() -> torch.device:
    """This rank's CUDA device, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        wanted, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if wanted > found:
            raise ConfigError(f"{wanted} processes on this node, which has {found} GPUs; lower NGPU")
        device = torch.device("cuda", local_rank())
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


def environment(rt: Runtime) -> dict[str, Any]:
    """What the numbers of a run depend on besides its job: versions and hardware."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(rt.device),
        "cuda": torch.version.cuda,
        "world_size": rt.world_size,
        "cpu_threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def leave(code: int) -> NoReturn:
    """End the process at once with `code`.

    An interpreter that finalises while gloo's threads run can abort a finished run (pytorch issue 179291), so
    a distributed process does not finalise. Writers and loaders must be closed before.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever read it may be gone
            stream.flush()
    if code == 1 and world_size() > 1:
        time.sleep(2)  # this crash may only echo a peer's end, whose own code the launcher is to see first
    os._exit(code)


def choose_param_dtype(training: Training, device: torch.device) -> torch.dtype:
    if training.mixed_precision_param == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, training.mixed_precision_param)


def _init_process_group(device: torch.device, comm: Comm, rank: int, size: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    meeting: dict[str, Any] = {}
    if size == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):  # one node: no port is opened to the network
        stay_on_this_node()
        store = _store_on_this_node(size)
        if store is not None:
            store.set_timeout(timeout)
            meeting = {"store": store, "rank": rank, "world_size": size}
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timeout, device_id=device_id, **meeting)


def _store_on_this_node(size: int) -> Any:
    """Where the ranks of one node meet: in memory if there is one, else in a file of the launcher's. None
    under another launcher, which has a way of its own."""
    if size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if folder := os.environ.get(NOTES):
        return dist.FileStore(os.path.join(folder, "store"), size)  # type: ignore[attr-defined]
    return None


def _note_of(rank: int) -> str:
    folder = os.environ.get(NOTES)
    return os.path.join(folder, f"rank-{rank}") if folder else os.devnull


def _write_note(note: str, error: BaseException) -> None:
    with suppress(OSError), open(note, "w", encoding="utf-8", errors="backslashreplace") as f:
        f.write(f"{type(error).__name__}: {error}")


@contextmanager
def _note_for_the_launcher(rank: int) -> Iterator[None]:
    """The launcher has made a note for this rank. It is taken away when the body is done, so that the
    launcher notices a rank that leaves before; an error in the body is written into it."""
    folder, note = os.environ.get(NOTES), _note_of(rank)
    try:
        yield
    except (Exception, SystemExit) as error:
        _write_note(note, error)
        raise
    if folder:
        with suppress(OSError):
            os.unlink(note)


def _die_with_the_launcher() -> None:
    """Linux: a launcher killed with -9 leaves no ranks behind, which would hold the devices and the
    folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
            os._exit(1)  # it died before this line


@contextmanager
def _collecting_only_when_due(gc_freq: int) -> Iterator[None]:
    was_enabled = gc.isenabled()
    if gc_freq:
        gc.disable()
        if torch.cuda.is_initialized():
            gc.collect()  # what an earlier run in this process left may hold the GPU's memory
        gc.freeze()  # looking through what was imported takes 0.3 s
    try:
        yield
    finally:
        if gc_freq:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _set_determinism(on: bool) -> None:
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.benchmark = False
