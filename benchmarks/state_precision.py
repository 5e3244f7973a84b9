"""Errors of AdamW's state in bfloat16 and in 8 bits, against fp32.

    titanlite train train_configs/debug.toml --job.dump_folder=outputs/debug
    python benchmarks/state_precision.py --checkpoint outputs/debug/checkpoint/step-160 \
        --output benchmarks/results/state_precision.json

stored_once: relative error of m / sqrt(v) if the moments of a checkpoint with fp32 state are stored once.
stored_each_step: the same after 60 steps that store the moments each time, for gradients whose sizes spread
log-normally within a block. second_moment: sqrt(v) divided by what fp32 state has, after steps with steady
gradients, and with gradients that shrink tenfold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from titanlite.checkpoint.reader import load_tensors  # noqa: E402
from titanlite.checkpoint.state import optimizer_tensors  # noqa: E402
from titanlite.job import load_recorded_job  # noqa: E402
from titanlite.mesh import ALONE  # noqa: E402
from titanlite.optim.base import make_state  # noqa: E402
from titanlite.optim.low_bit import BLOCK, DTYPES, _decode, _encode, has_blocks  # noqa: E402

Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def bfloat16(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments as bfloat16 state keeps them."""
    return m.bfloat16().float(), v.bfloat16().float()


def linear(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear 8-bit codes for both moments: the obvious choice, which int8 state does not use."""
    scale1, scale2 = (x.abs().amax(-1, keepdim=True).clamp(min=1e-30) for x in (m, v))
    return (m / scale1 * 127).round() / 127 * scale1, (v / scale2 * 255).round() / 255 * scale2


def int8(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments as 8-bit state keeps them: fp32 [number of blocks, 64]."""
    return _decode(*(t.to(dtype) for t, dtype in zip(_encode(m, v), DTYPES)))


STORES: dict[str, Store] = {"bfloat16": bfloat16, "int8": int8, "linear": linear}


def error(exact: tuple[torch.Tensor, torch.Tensor], stored: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The relative error of m / sqrt(v)."""
    a, b = (m / (v.sqrt() + EPS) for m, v in (exact, stored))
    return ((b - a).norm() / a.norm()).item()


def stored_once(checkpoint: Path) -> dict[str, dict[str, float]]:
    """Errors by the role of the parameters."""
    job = load_recorded_job(checkpoint, allow_imports=False)
    net = job.model.build()
    optimizer = job.optimizer.build(net, ALONE)
    make_state(optimizer)
    load_tensors(checkpoint, {"optimizer": optimizer_tensors(net, optimizer)})
    blocks: dict[str, list[torch.Tensor]] = {}
    for name, p in net.named_parameters():
        if has_blocks(p):
            state = optimizer.state[p]
            both = torch.stack([state[key].view(-1, BLOCK) for key in ("exp_avg", "exp_avg_sq")])
            blocks.setdefault(net.parameter_role(name), []).append(both)
    moments = {role: torch.cat(parts, 1).unbind() for role, parts in blocks.items()}
    return {
        role: {name: error((m, v), store(m, v)) for name, store in STORES.items()}
        for role, (m, v) in moments.items()
    }


def stored_each_step(spread: float, num_steps: int = 60) -> dict[str, float]:
    """Errors of the newest update. `spread`: standard deviation of the logarithm of the gradients' size."""
    errors = {}
    for name, store in STORES.items():
        generator = torch.Generator().manual_seed(0)
        size = torch.exp(spread * torch.randn(256, BLOCK, generator=generator))
        mean = 0.3 * size * torch.randn(size.shape, generator=generator)
        m = v = exact_m = exact_v = torch.zeros_like(size)
        for _ in range(num_steps):
            g = mean + size * torch.randn(size.shape, generator=generator)
            exact_m, exact_v = exact_m.lerp(g, 1 - BETA1), exact_v.lerp(g.square(), 1 - BETA2)
            new = m.lerp(g, 1 - BETA1), v.lerp(g.square(), 1 - BETA2)
            m, v = store(*new)
        errors[name] = error((exact_m, exact_v), (m, v))
    return errors


def second_moment(beta2: float, num_steps: int, decay: float, store: Store) -> dict[str, float]:
    """sqrt(v) / sqrt(v in fp32) after the steps: the mean, and the range of nine tenths of the values.
    `decay`: factor by which the gradients shrink."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(0.5 * torch.randn(256, BLOCK, generator=generator))
    v = exact = torch.zeros_like(size)
    for step in range(num_steps):
        scale = size * decay ** (step / num_steps)
        square = (scale * torch.randn(size.shape, generator=generator)).square()
        exact = exact.lerp(square, 1 - beta2)
        v = store(exact, v.lerp(square, 1 - beta2))[1]
    ratio = (v / exact).sqrt().flatten()
    low, high = ratio.quantile(torch.tensor([0.05, 0.95])).tolist()
    return {"mean": ratio.mean().item(), "5%": low, "95%": high}


def main() -> None:
    """Measure all errors and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    result = {
        "stored_once": stored_once(options.checkpoint),
        "stored_each_step": {str(spread): stored_each_step(spread) for spread in (0.5, 1.0)},
        "second_moment": [
            {
                "state_dtype": name,
                "beta2": beta2,
                "gradients": text,
                **second_moment(beta2, steps, decay, store),
            }
            for name, store in (("bfloat16", bfloat16), ("int8", int8))
            for beta2, steps in ((0.95, 400), (0.99, 1500), (0.999, 4000))
            for text, decay in (("steady", 1.0), ("shrink tenfold", 0.1))
        ],
    }
    print(json.dumps(result, indent=1))
    write_result(options.output, result, "torch")


if __name__ == "__main__":
    main()
