"""Time of the Newton-Schulz iteration by shape and number of matrices, as it is and compiled, and whether a
matrix has the same bits in a batch as alone.

    python benchmarks/orthogonalize.py --output benchmarks/results/NAME.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from titanlite.optim.orthogonalize import coefficients_of, num_flops, orthogonalize  # noqa: E402

SHAPES = [(512, 512), (512, 2048), (768, 3072), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336)]
BATCHES = (1, 2, 4)
NUM_STEPS = 5


def main() -> None:
    """Measure all shapes and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--max-dim", type=int, default=1 << 20, help="leave out larger matrices")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = []
    for m, n in (shape for shape in SHAPES if max(shape) <= options.max_dim):
        for batch in BATCHES:
            table.append(measure(torch.randn(batch, m, n, device=device), options.repeats))
            print(json.dumps(table[-1]), flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    write_result(options.output, {"device": name, "num_steps": NUM_STEPS, "table": table}, "torch")


def measure(x: torch.Tensor, repeats: int) -> dict[str, object]:
    """The times of one batch [num_matrices, m, n] in bf16, and the comparison with its matrices alone."""
    coefficients = coefficients_of("polar_express", NUM_STEPS)

    def run(matrices: torch.Tensor) -> torch.Tensor:
        return orthogonalize(matrices, coefficients, torch.bfloat16)

    torch.compiler.reset()
    compiled = torch.compile(run, dynamic=False, fullgraph=True)
    alone = torch.cat([run(x[i : i + 1]) for i in range(len(x))])
    flops = len(x) * num_flops(x.shape[1], x.shape[2], NUM_STEPS)
    eager_ms = median_ms(lambda: run(x), x.device, repeats)
    return {
        "matrices": len(x),
        "shape": list(x.shape[1:]),
        "eager_ms": eager_ms,
        "compiled_ms": median_ms(lambda: compiled(x), x.device, repeats),
        "eager_tflops": flops / eager_ms / 1e9,
        "bits_as_alone": torch.equal(run(x), alone),
    }


def median_ms(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call in milliseconds, after two calls."""
    function(), function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


if __name__ == "__main__":
    main()
