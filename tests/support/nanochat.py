"""A small checkpoint in nanochat's format with random weights, which do not depend on nanochat's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "sequence_len": 256, "vocab_size": 320, "n_layer": 5, "n_head": 3, "n_kv_head": 3, "n_embd": 96,
    "window_pattern": "SL",
}  # fmt: skip
# The same model as fields of the family gpt. nanochat's norms have the epsilon of the dtype.
FIELDS: dict[str, Any] = {
    "vocab_size": 320, "n_layers": 5, "n_heads": 3, "n_kv_heads": 3, "dim": 96, "head_dim": 32,
    "hidden_dim": 384, "sliding_window": 129, "layer_pattern": "SLSLL",
    "norm_eps": torch.finfo(torch.float32).eps,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the model."""
    V, D, H, L = CONFIG["vocab_size"], CONFIG["n_embd"], CONFIG["n_head"], CONFIG["n_layer"]
    assert isinstance(L, int)
    tensors: dict[str, Any] = {
        "transformer.wte.weight": (V, D), "lm_head.weight": (V, D), "resid_lambdas": (L,), "x0_lambdas": (L,),
        "smear_gate.weight": (1, 24), "smear_lambda": (1,), "backout_lambda": (1,),
    }  # fmt: skip
    for i in range(L):
        block = f"transformer.h.{i}"
        tensors |= {f"{block}.attn.c_{name}.weight": (D, D) for name in ("q", "k", "v", "proj")}
        tensors |= {f"{block}.mlp.c_fc.weight": (4 * D, D), f"{block}.mlp.c_proj.weight": (D, 4 * D)}  # type: ignore[operator]
        if i % 2 == 0:
            tensors |= {f"{block}.attn.ve_gate.weight": (H, 12), f"value_embeds.{i}.weight": (V, D)}
    return tensors


def random_tensors() -> dict[str, torch.Tensor]:
    """Weights large enough that mistakes show."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes().items():
        mean = 1.0 if name == "resid_lambdas" else 0.5 if len(shape) == 1 else 0.0
        tensors[name] = mean + 0.15 * torch.randn(shape, generator=generator)
    return tensors


def tokens() -> torch.Tensor:
    """Inputs and targets of two sequences, int64 [2, 257]."""
    return torch.randint(0, 320, (2, 257), generator=torch.Generator().manual_seed(1))


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write the checkpoint of step 10 into the new `folder`."""
    folder.mkdir()
    torch.save(random_tensors() if tensors is None else tensors, folder / "model_000010.pt")
    (folder / "meta_000010.json").write_text(json.dumps({"step": 10, "model_config": CONFIG}))
    return folder
