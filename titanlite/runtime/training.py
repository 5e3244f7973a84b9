"""[training]: the size, number, precision and seed of the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from titanlite.config.amount import Amount, Steps
from titanlite.config.component import ConfigError, check_at_least


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A batch size up to `until`, from the end of the entry before or the start of the run."""

    until: str
    """End of this batch size, counted from the start of the run: "4B tokens", "1.5 epochs", "20
    tokens/parameter" or "1000000 sequences"."""
    global_batch_size: int
    """Sequences per optimizer step, over all ranks."""

    def __post_init__(self) -> None:
        try:
            Amount.parse_place(self.until)
        except ConfigError as e:
            raise ConfigError(str(e), "until") from None
        check_at_least(self, 1, "global_batch_size")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Size, number and precision of the optimizer steps."""

    seq_len: int = 2048
    """Tokens that each sequence predicts; it has seq_len + 1 tokens."""
    local_batch_size: int = 8
    """Sequences in one micro-batch of one data-parallel rank, which have to fit into memory."""
    global_batch_size: int = -1
    """Sequences per optimizer step, over all ranks. Above local_batch_size x data-parallel ranks,
    micro-batches are accumulated. -1: that product."""
    batch_ramp: list[BatchRamp] = field(default_factory=list)
    """Other batch sizes at the start of the run, `[[training.batch_ramp]]` tables in ascending order of
    `until`; global_batch_size holds after the last. A batch size of a stage takes precedence."""
    batch_ramp_lr: Literal["none", "sqrt", "linear"] = "none"
    """Factor of the learning rate during batch_ramp: the square root of batch size / global_batch_size, this
    ratio (`linear`), or 1."""
    steps: Steps = 10000
    """Optimizer steps of the run."""
    max_norm: float = 1.0
    """Largest total norm of gradients, which are scaled down to it; 0: no clipping."""
    clip: Literal["global", "tensor"] = "global"
    """`global`: scale all gradients by one factor, to a total norm of max_norm. `tensor`: after 100 such
    steps, limit each parameter's gradient to 1.05 times the running average of its norm (AdaGC, arXiv
    2502.11034)."""
    seed: int = 0
    """Seed of initial weights and data order."""
    deterministic: bool = False
    """Use deterministic kernels: reruns on the same layout are bit-identical, at some cost in speed."""
    same_bits_on_any_ranks: bool = False
    """Compute the same weights, bit by bit, on any number of data-parallel ranks that divides the
    micro-batches of a step, on GPUs of one kind. Implies `deterministic`."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """dtype of forward and backward; the optimizer's weights are float32. `auto`: bfloat16 on CUDA, else
    float32."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """dtype of gradient sums over ranks. bfloat16 halves the traffic, and implies parallelism.fsdp_reduce =
    "micro_batch"; micro-batches still accumulate in float32."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and run the optimizer on the CPU. Slow."""
    gc_freq: int = 50
    """Steps between Python's garbage collections, which all ranks run at the same step. 0: automatic."""

    @property
    def is_deterministic(self) -> bool:
        """Whether kernels are deterministic."""
        return self.deterministic or self.same_bits_on_any_ranks

    def __post_init__(self) -> None:
        check_at_least(self, 0, "gc_freq", "max_norm")
        check_at_least(self, 1, "seq_len", "local_batch_size", "steps")
        if self.local_batch_size * self.seq_len >= 1 << 31:
            raise ConfigError(
                f"{self.local_batch_size} sequences of {self.seq_len} tokens are 2^31 tokens or more, too "
                "many for one micro-batch; set global_batch_size to accumulate a larger batch",
                "local_batch_size",
            )
        if self.global_batch_size < 1 and self.global_batch_size != -1:
            raise ConfigError(f"{self.global_batch_size} is neither -1 nor at least 1", "global_batch_size")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"{self.seed} is not in [0, 2^63)", "seed")

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError if `device` lacks the precision that the settings need."""
        if self.same_bits_on_any_ranks and device.type == "mps":
            raise ConfigError(
                "sums losses and squares of gradients in float64, which Apple's GPUs (mps) lack: unset it",
                "training.same_bits_on_any_ranks",
            )

    def check_resumed(self, size: int, before: int) -> None:
        """Raises ConfigError if the global batch size differs from the resumed run's only because the number
        of ranks does. `size`: global_batch_size on these ranks. `before`: the resumed run's."""
        if size != before and self.global_batch_size == -1:
            raise ConfigError(
                f"this run takes {before} sequences per step; global_batch_size = -1 would make it {size} "
                f"here: set --training.global_batch_size={before} to keep it, or ={size} to change it"
            )


@dataclass(frozen=True)
class BatchLayout:
    """How the sequences of one optimizer step are split into micro-batches: global_size = micro_batch_size x
    num_micro_batches x data-parallel ranks. Sizes count sequences. global_size follows from
    training.global_batch_size; stages and batch ramps may have others. `same_bits`:
    training.same_bits_on_any_ranks."""

    global_size: int
    micro_batch_size: int
    num_ranks: int
    same_bits: bool = False

    @classmethod
    def from_training(cls, training: Training, dp_size: int) -> BatchLayout:
        """The layout for `dp_size` data-parallel ranks. Raises ConfigError if global_batch_size is not
        a multiple of local_batch_size x dp_size."""
        unit = training.local_batch_size * dp_size
        size = unit if training.global_batch_size == -1 else training.global_batch_size
        layout = cls(size, training.local_batch_size, dp_size, training.same_bits_on_any_ranks)
        layout.num_micro_batches(size, "training.global_batch_size")
        return layout

    def num_micro_batches(self, size: int, key: str | None = None) -> int:
        """Number of micro-batches per rank in a step of `size` sequences. Raises ConfigError, with `key`, if
        `size` is not a multiple of micro_batch_size x data-parallel ranks."""
        unit = self.micro_batch_size * self.num_ranks
        num, rest = divmod(size, self.micro_batch_size)
        if self.same_bits and not rest and num % self.num_ranks:
            numbers = ", ".join(str(n) for n in range(1, num + 1) if num % n == 0)
            raise ConfigError(
                f"{self.num_ranks} ranks cannot share the {num} micro-batches of a step; "
                f"training.same_bits_on_any_ranks allows {numbers} data-parallel ranks",
                key,
            )
        if size % unit:
            nearest = sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit})
            ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
            verb = "is" if len(nearest) == 1 else "are"
            raise ConfigError(
                f"{size} sequences are not a multiple of local_batch_size {self.micro_batch_size} x "
                f"{ranks} = {unit}; the nearest {verb} {' or '.join(str(n) for n in nearest)}",
                key,
            )
        return size // unit


def choose_param_dtype(training: Training, device: torch.device) -> torch.dtype:
    if training.mixed_precision_param == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, training.mixed_precision_param)
