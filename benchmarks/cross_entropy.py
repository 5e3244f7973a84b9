"""Time of the cross-entropy of one chunk of logits and of its gradient: titanlite's kernel beside the two
kernels that torch.compile makes of the same function, and its kernel with a soft cap, on one CUDA GPU.

    python benchmarks/cross_entropy.py --output benchmarks/results/cross_entropy_h200.json

Each case has 4096 tokens in bf16. The result has the median time in milliseconds, and the bytes that have to
be moved, one read and one write of the logits, per second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from titanlite.losses import loss_and_gradient_  # noqa: E402
from titanlite.torch_compat import loss_compile_options  # noqa: E402

SOFTCAP = 15.0
TOKENS, VOCABULARIES = 4096, (32_768, 50_257, 50_304, 128_256, 151_936)
WARM_UP, REPEATS = 3, 20


def main() -> None:
    """Time all cases and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    from titanlite.cross_entropy_kernel import fused_loss_and_gradient_

    cases = []
    for size in VOCABULARIES:
        logits = torch.randn(TOKENS, size, device="cuda", dtype=torch.bfloat16)
        targets = torch.randint(0, size, (TOKENS,), device="cuda")
        torch._dynamo.reset()  # otherwise all sizes but the first would be symbolic
        compiled = torch.compile(loss_and_gradient_, fullgraph=True, options=loss_compile_options("inductor"))
        capped = partial(fused_loss_and_gradient_, softcap=SOFTCAP)
        functions = {"titanlite": fused_loss_and_gradient_, "torch.compile": compiled}
        for name, function in {**functions, f"titanlite, soft cap of {SOFTCAP:g}": capped}.items():
            ms = median_ms(function, logits, targets)
            case = {"kernel": name, "tokens": TOKENS, "vocabulary": size, "ms": ms}
            cases.append(case | {"tb_per_s": 2 * logits.nbytes / ms / 1e9})
            print(f"{name:26} {size:7,} ids: {ms:.3f} ms, {cases[-1]['tb_per_s']:.2f} TB/s", flush=True)
    write_result(options.output, {"device": torch.cuda.get_device_name(), "cases": cases}, "torch", "triton")


def median_ms(function: Callable[..., torch.Tensor], logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Median time of `function`, each time with fresh logits."""
    work, times = logits.clone(), []
    for _ in range(WARM_UP + REPEATS):
        work.copy_(logits)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in (0, 1))
        begin.record()
        function(work, targets)
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times[WARM_UP:])


if __name__ == "__main__":
    main()
