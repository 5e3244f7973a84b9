"""Speed of the attention kernels by shape and mask on one GPU, forward and forward with backward, in bf16.

    python benchmarks/attention_kernels.py --output benchmarks/results/attention_kernels_h200.json [--fa4]
    python benchmarks/attention_kernels.py --table benchmarks/results/attention_kernels_h200.json

A shape is called HEADS/KEY HEADS/HEAD DIM MASK LENGTH, such as `32/8/128 causal 8192`; --only selects shapes
by a regular expression. Each shape has --tokens tokens, and at least one sequence. A time is the median over
at least 30 ms of calls, measured by events on the device. Operations are counted as in PaLM (Chowdhery et al.
2022, appendix B), halved for the causal mask: 2 * T^2 * heads * head dim for the forward of a sequence or
document of T tokens, 2.5 times as many for the backward. `default`: the kernel that torch chooses.

--fa4 adds FlashAttention 4 if torch and the installed flash-attn-4 support it. FlexAttention is compiled for
each shape and comes last; shapes that would begin after --budget seconds have an error instead of times.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from titanlite.attention.base import Attention, AttentionNeeds  # noqa: E402
from titanlite.attention.flex import Flex, FlexAttention, Mask  # noqa: E402
from titanlite.attention.sdpa import CAUSAL, KERNELS, SDPA  # noqa: E402
from titanlite.attention.varlen import Varlen, VarlenAttention  # noqa: E402
from titanlite.torch_compat import sdp_choice  # noqa: E402

HEADS = [(32, 8, 128), (16, 8, 128), (32, 8, 64), (12, 4, 64)]  # Llama 8B, Qwen3 0.6B, Llama 1B, Llama 125M
LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536, 131072]
LONGEST_WITH_DOCUMENTS, LONGEST_DENSE_MASK = 32768, 8192
HEADS_OF_FLEX = {(32, 8, 128), (32, 8, 64)}  # compilation takes seconds per shape
SDPA_KERNELS = {name: backend for backend, name in KERNELS.items() if name != "math"}
BACKWARD_FLOPS = 2.5  # relative to the forward


class Shape(NamedTuple):
    """Sequences of `length` tokens. `documents`: the lengths of the documents of each sequence; None: causal
    attention over whole sequences."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    length: int
    num_sequences: int
    documents: list[list[int]] | None

    @property
    def heads(self) -> str:
        return f"{self.n_heads}/{self.n_kv_heads}/{self.head_dim}"

    @property
    def mask(self) -> str:
        return "causal" if self.documents is None else "documents"

    @property
    def name(self) -> str:
        return f"{self.heads} {self.mask} {self.length}"

    @property
    def forward_flops(self) -> float:
        lengths = [[self.length]] * self.num_sequences if self.documents is None else self.documents
        return 2.0 * sum(n * n for sequence in lengths for n in sequence) * self.n_heads * self.head_dim


def main() -> None:
    """Measure all selected shapes and write the result, or print the table of a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="print this result as a Markdown table; measure nothing")
    parser.add_argument("--only", default="", help="regular expression that is in the names of the shapes")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths in tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fa4", action="store_true", help="also measure FlashAttention 4")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no shape begins")
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    if options.output is None:
        parser.error("--output or --table is required")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --tokens 256 --lengths 128 tests the script")
    shapes = [s for s in all_shapes(options.lengths, options.tokens) if re.search(options.only, s.name)]
    deadline = time.monotonic() + options.budget
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "tokens": options.tokens,
        "defaults": {s.name: default_kernel(s, device) for s in shapes if s.documents is None},
        "rows": rows,
    }
    for shape, kernel in measurements(shapes, options.fa4):
        row: dict[str, Any] = {
            "shape": shape.name,
            "heads": shape.heads,
            "mask": shape.mask,
            "length": shape.length,
            "sequences": shape.num_sequences,
            "kernel": kernel,
        }
        late = time.monotonic() > deadline
        times = {"error": "not measured: out of time"} if late else safely_measured(shape, kernel, device)
        rows.append({**row, **times})
        print(json.dumps(rows[-1]), flush=True)
        result["fastest"] = fastest(rows)
        write_result(options.output, result, "torch", "titanlite", "flash-attn-4")


def all_shapes(lengths: list[int], tokens: int) -> list[Shape]:
    """All shapes. The documents are the same for all heads."""
    shapes = []
    for heads in HEADS:
        for length in lengths:
            num_sequences = max(1, tokens // length)
            shapes.append(Shape(*heads, length, num_sequences, None))
            if length <= LONGEST_WITH_DOCUMENTS:
                draws = random.Random(length + 2)  # 8 to 11 documents per sequence at all lengths
                documents = [document_lengths(length, draws) for _ in range(num_sequences)]
                shapes.append(Shape(*heads, length, num_sequences, documents))
    return shapes


def document_lengths(length: int, draws: random.Random) -> list[int]:
    """Lengths of documents that fill a sequence: exponentially distributed, on average an eighth of it."""
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, max(1, round(draws.expovariate(8 / length)))))
    return lengths


def measurements(shapes: list[Shape], fa4: bool) -> Iterator[tuple[Shape, str]]:
    """Pairs of shapes and kernels in the order of measurement. FlashAttention 4 replaces torch's flash
    kernels between its first and last pair."""
    for shape in shapes:
        if shape.documents is None or shape.length <= LONGEST_DENSE_MASK:
            yield from ((shape, kernel) for kernel in SDPA_KERNELS)
        if shape.documents is not None or shape[:3] in HEADS_OF_FLEX:
            yield shape, "varlen"
    if fa4 and activated_fa4():
        for shape in shapes:
            if shape.documents is None:
                yield shape, "fa4"
            if shape.documents is not None or shape[:3] in HEADS_OF_FLEX:
                yield shape, "fa4 varlen"
        torch.nn.attention.restore_flash_attention_impl()
    yield from ((shape, "flex") for shape in shapes if shape[:3] in HEADS_OF_FLEX)


def activated_fa4() -> bool:
    """Replace torch's flash kernels by FlashAttention 4. Returns False, and says why, if that fails."""
    try:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    except Exception as error:  # a missing or unsuitable package must not end the measurement
        print(f"no FlashAttention 4: {one_line(error)}", flush=True)
        return False
    return True


def safely_measured(shape: Shape, kernel: str, device: torch.device) -> dict[str, Any]:
    """The times of a kernel, or why it failed."""
    try:
        return measured(shape, kernel, device)
    except Exception as error:  # kernels fail in many ways; the result records each
        return {"error": one_line(error)}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measured(shape: Shape, kernel: str, device: torch.device) -> dict[str, Any]:
    """Median milliseconds and TFLOP/s of a kernel."""
    q, k, v = inputs(shape, device)
    sdpa_name = "flash" if kernel == "fa4" else kernel
    on_kernel = sdpa_kernel(SDPA_KERNELS[sdpa_name]) if sdpa_name in SDPA_KERNELS else nullcontext()
    attention = attention_for(shape, kernel, device)
    with on_kernel:
        output_gradient = torch.randn_like(attention.attend(q, k, v))

        def forward_backward() -> None:
            torch.autograd.grad(attention.attend(q, k, v), (q, k, v), output_gradient)

        forward_ms = median_ms(lambda: attention.attend(q, k, v), device)
        both_ms = median_ms(forward_backward, device)
    return {
        "forward_ms": round(forward_ms, 4),
        "forward_backward_ms": round(both_ms, 4),
        "forward_tflops": round(shape.forward_flops / forward_ms / 1e9, 1),
        "forward_backward_tflops": round((1 + BACKWARD_FLOPS) * shape.forward_flops / both_ms / 1e9, 1),
    }


def inputs(shape: Shape, device: torch.device) -> list[torch.Tensor]:
    """Queries, keys and values [sequences, tokens, heads, head dim]."""
    torch.manual_seed(0)
    return [
        torch.randn(
            shape.num_sequences,
            shape.length,
            heads,
            shape.head_dim,
            device=device,
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        for heads in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
    ]


def attention_for(shape: Shape, kernel: str, device: torch.device) -> Attention:
    """The package's attention object that runs `kernel`. Over whole sequences the backends flex and varlen
    would run scaled_dot_product_attention, so that their objects are made here."""
    T, B = shape.length, shape.num_sequences
    backend = {"varlen": Varlen, "fa4 varlen": Varlen, "flex": Flex}.get(kernel, SDPA)
    if shape.documents is None and backend is SDPA:
        return CAUSAL
    if backend is not SDPA:  # SDPA.build would change torch's switches for the rest of the process
        needs = AttentionNeeds(
            device=device,
            dtype=torch.bfloat16,
            seq_len=T,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            masks_documents=True,
        )
        backend().build(needs)
    if shape.documents is None:
        if backend is Flex:
            return FlexAttention(Mask(T, T, device)).prepared()
        return VarlenAttention(torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=device), T)
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in shape.documents]
    return backend().for_documents(torch.stack(positions).to(device), sum(map(len, shape.documents)))


def default_kernel(shape: Shape, device: torch.device) -> str:
    """The kernel of scaled_dot_product_attention that torch chooses for causal attention."""
    q, k, v = (x.transpose(1, 2) for x in inputs(shape, device))
    try:
        return KERNELS.get(SDPBackend(sdp_choice(q, k, v, None)), "none")
    except RuntimeError as error:
        return one_line(error)


def median_ms(function: Callable[[], object], device: torch.device) -> float:
    """The median time of a call in milliseconds, after up to three calls, over at least 30 ms of calls."""
    for _ in range(3):
        if (warm_up_ms := times_ms(function, device, 1)[0]) > 100:
            break
    num_calls = min(1000, math.ceil(30 / warm_up_ms))
    return statistics.median(times_ms(function, device, num_calls if warm_up_ms > 100 else max(3, num_calls)))


def times_ms(function: Callable[[], object], device: torch.device, num_calls: int) -> list[float]:
    """The time of each call in milliseconds. The host does not wait for the device between calls."""
    if device.type != "cuda":
        began = [time.perf_counter()]
        for _ in range(num_calls):
            function()
            began.append(time.perf_counter())
        return [1000 * (end - start) for start, end in pairwise(began)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def fastest(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The fastest kernel of each shape that has one, in the forward and in forward with backward."""
    by_shape: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            by_shape.setdefault(row["shape"], []).append(row)
    return {
        shape: {
            name: min(measured_rows, key=itemgetter(f"{name}_ms"))["kernel"]
            for name in ("forward", "forward_backward")
        }
        for shape, measured_rows in by_shape.items()
    }


def table(result: dict[str, Any]) -> str:
    """A Markdown table: TFLOP/s of forward / forward with backward by shape and kernel. Bold: the fastest in
    forward with backward."""
    rows = {(row["shape"], row["kernel"]): row for row in result["rows"]}
    shapes, kernels = (list(dict.fromkeys(key[i] for key in rows)) for i in range(2))
    lines = [["heads/key heads/head dim", "mask", "length", "default", *kernels]]
    lines.append(["---", "---", "---:", "---", *["---:"] * len(kernels)])
    for shape in shapes:
        best = result["fastest"].get(shape, {}).get("forward_backward")
        cells = [cell(rows.get((shape, kernel)), kernel == best) for kernel in kernels]
        lines.append([*shape.split(" "), result["defaults"].get(shape, ""), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: dict[str, Any] | None, is_best: bool) -> str:
    """TFLOP/s of a measurement; `error` if it failed, empty if there is none."""
    if row is None or "error" in row:
        return "" if row is None else "error"
    text = f"{row['forward_tflops']:.0f} / {row['forward_backward_tflops']:.0f}"
    return f"**{text}**" if is_best else text


def one_line(error: Exception) -> str:
    """The type and the first line of an error, at most 200 characters."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


if __name__ == "__main__":
    main()
