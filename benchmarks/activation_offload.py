"""Time and peak memory of forward and backward when activations wait in host memory for the backward, beside
activation checkpointing: blocks of Llama 3 8B, compiled, in bf16, on one sequence.

    python benchmarks/activation_offload.py --output benchmarks/results/activation_offload_h100.json
        [--layers 4] [--seq-len 32768]

A case keeps what its `mode` of activation checkpointing keeps, and moves tensors of at least 16 MiB, in the
order in which they are saved, to pinned host memory by a stream of its own during the forward, until a
`share` of their bytes is used up. The backward fetches tensors two ahead of their use. Parameters are not
moved; their bf16 copies, which a single process keeps for the backward, and the tensors that the loss saves
are. A tensor that is saved twice is moved twice. No optimizer runs; gradients are freed after each step.
`host_link_gib_s`: the measured speed of such copies alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from titanlite.data.batch import Batch  # noqa: E402
from titanlite.losses import ChunkedCrossEntropy  # noqa: E402
from titanlite.mesh import ALONE  # noqa: E402
from titanlite.models.llama3 import Llama3  # noqa: E402
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint  # noqa: E402
from titanlite.parallel.apply import parallelize  # noqa: E402
from titanlite.parallel.compile import Compile  # noqa: E402
from titanlite.parallel.settings import ParallelSettings  # noqa: E402
from titanlite.parallel.sharded_model import ShardedModel  # noqa: E402

GIB = 1 << 30
SMALLEST = 16 << 20  # bytes of a tensor that is worth a copy
AHEAD = 2  # tensors that are fetched before the backward asks for them
MODES = {
    "none": ActivationCheckpoint(),
    "op": ActivationCheckpoint(mode="selective"),
    "full": ActivationCheckpoint(mode="full"),
}
CASES = [
    ("none", 0.0), ("op", 0.0), ("full", 0.0), ("full", 1.0),
    ("op", 0.5), ("op", 1.0), ("none", 0.25), ("none", 0.5), ("none", 1.0),
]  # fmt: skip


class Offload:
    """Saved-tensor hooks that move the first `budget` bytes of each forward to the host, and back."""

    def __init__(self, budget: float, weights: set[int], device: torch.device):
        self.budget, self.weights, self.device = budget, weights, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: dict[int, torch.Tensor] = {}  # of earlier steps, by position
        self.begin_step()

    def begin_step(self) -> None:
        self.saved = 0
        self.left, self.moved = self.budget, list[dict[str, Any]]()

    def copying(self) -> Any:
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def pack(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        if (
            tensor.device != self.device
            or size < SMALLEST
            or tensor.untyped_storage().data_ptr() in self.weights
        ):
            return tensor
        self.saved += size
        if size > self.left:
            return tensor
        self.left -= size
        position = len(self.moved)
        buffer = self.buffers.get(position)
        if buffer is None or buffer.shape != tensor.shape or buffer.stride() != tensor.stride():
            buffer = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self.device.type == "cuda"
            )
            self.buffers[position] = buffer
        with self.copying():
            buffer.copy_(tensor, non_blocking=True)
        if self.stream is not None:
            tensor.record_stream(self.stream)
        self.moved.append({"host": buffer, "device": None})
        return position

    def fetch(self, position: int) -> None:
        entry = self.moved[position] if 0 <= position < len(self.moved) else None
        if entry is None or entry["device"] is not None:
            return
        with self.copying():
            entry["device"] = entry["host"].to(self.device, non_blocking=True)
            if self.stream is not None:
                entry["event"] = self.stream.record_event()

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        for position in range(packed, packed - AHEAD - 1, -1):
            self.fetch(position)
        entry = self.moved[packed]
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(entry["event"])
            entry["device"].record_stream(torch.cuda.current_stream())
        tensor, entry["device"] = entry["device"], torch.empty(0)
        return tensor


def main() -> None:
    """Measure all cases and write the result after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--flavor", default="8B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "layers": options.layers,
        "seq_len": options.seq_len,
        "host_link_gib_s": host_link(device) if device.type == "cuda" else None,
        "cases": [],
    }
    saved: dict[str, int] = {}
    for mode, share in CASES:
        case = {"mode": mode, "share": share}
        try:
            case |= measured(options, device, mode, share, saved)
        except torch.OutOfMemoryError:
            case["error"] = "out of memory"
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        result["cases"].append(case)
        print(json.dumps(case), flush=True)
        write_result(options.output, result, "torch")


def host_link(device: torch.device) -> dict[str, float]:
    """GiB/s of copies of 1 GiB to pinned host memory and back."""
    on_device = torch.empty(GIB, dtype=torch.uint8, device=device)
    on_host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)

    def speed(copy: Callable[[], object]) -> float:
        copy()
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        return round(1 / (time.perf_counter() - began), 1)

    return {
        "to_host": speed(lambda: on_host.copy_(on_device, non_blocking=True)),
        "to_device": speed(lambda: on_device.copy_(on_host, non_blocking=True)),
    }


def measured(
    options: argparse.Namespace, device: torch.device, mode: str, share: float, saved: dict[str, int]
) -> dict[str, float]:
    """Median seconds of forward and backward, peak memory, and bytes moved to the host. `saved`: the bytes
    that each mode saves, which its first case, without offload, finds."""
    model = build(options, device, MODES[mode])
    weights = {p.untyped_storage().data_ptr() for p in model.net.parameters()}
    offload = Offload(share * saved.get(mode, 0), weights, device)
    torch.manual_seed(0)
    tokens = torch.randint(0, model.net.vocab_size, (1, options.seq_len + 1), device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), options.seq_len, 0)
    num_targets = torch.tensor(options.seq_len, device=device)
    seconds = []
    for step in range(options.steps + 2):
        if step == 2 and device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        offload.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
            loss = model.forward_backward([batch], num_targets)
        loss.item()
        seconds.append(time.perf_counter() - began)
        gradient = float(sum(p.grad.float().square().sum() for p in model.net.parameters()) ** 0.5)
        model.net.zero_grad()
    saved.setdefault(mode, offload.saved)
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
    return {
        "seconds": round(statistics.median(seconds[2:]), 4),
        "peak_allocated_gib": round(peak, 2),
        "saved_gib": round(offload.saved / GIB, 2),
        "moved_gib": round((offload.budget - offload.left) / GIB, 2),
        "loss": loss.item(),
        "gradient_norm": gradient,
    }


def build(
    options: argparse.Namespace, device: torch.device, checkpointing: ActivationCheckpoint
) -> ShardedModel:
    """The model with random weights."""
    net = Llama3(flavor=options.flavor, overrides={"n_layers": options.layers}).build_on_meta()
    settings = ParallelSettings(
        activation_checkpoint=checkpointing, compile=Compile(enable=True), param_dtype=torch.bfloat16
    )
    model = parallelize(net, ChunkedCrossEntropy(), ALONE, settings)
    model.materialize(device, seed=0)
    return model


if __name__ == "__main__":
    main()
