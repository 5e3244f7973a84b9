"""Checkpoints in torchtitan's and Meta's layouts, and the logits of their models."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

from titanlite.models.llama3 import Llama3Config


def random_tensors(c: Llama3Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a model under Meta's names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    tensors = {"tok_embeddings.weight": normal(c.vocab_size, c.dim), "norm.weight": 1 + normal(c.dim)}
    tensors["output.weight"] = normal(c.vocab_size, c.dim)
    for i in range(c.n_layers):
        shapes = {
            "attention.wq": (q, c.dim), "attention.wk": (kv, c.dim), "attention.wv": (kv, c.dim),
            "attention.wo": (c.dim, q), "feed_forward.w1": (c.hidden_dim, c.dim),
            "feed_forward.w2": (c.dim, c.hidden_dim), "feed_forward.w3": (c.hidden_dim, c.dim),
        }  # fmt: skip
        tensors |= {f"layers.{i}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for norm in ("attention_norm", "ffn_norm"):
            tensors[f"layers.{i}.{norm}.weight"] = 1 + normal(c.dim)
    return tensors


def reference_logits(w: dict[str, torch.Tensor], c: Llama3Config, tokens: torch.Tensor) -> torch.Tensor:
    """A Llama with Meta's rotary embedding: two neighbouring values are a complex number, which is
    rotated."""
    frequencies = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
    if c.rope_factor != 1:
        wavelength = 2 * math.pi / frequencies
        smooth = (c.rope_original_max_position / wavelength - c.rope_low_freq_factor) / (
            c.rope_high_freq_factor - c.rope_low_freq_factor
        )
        between = (1 - smooth) * frequencies / c.rope_factor + smooth * frequencies
        long = wavelength > c.rope_original_max_position / c.rope_low_freq_factor
        short = wavelength < c.rope_original_max_position / c.rope_high_freq_factor
        scaled = torch.where(long, frequencies / c.rope_factor, between)
        frequencies = torch.where(short, frequencies, scaled)
    angles = torch.outer(torch.arange(tokens.shape[1]), frequencies)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.norm_eps) * w[f"{name}.weight"]

    x = w["tok_embeddings.weight"][tokens]
    for i in range(c.n_layers):
        at = f"layers.{i}."
        h = norm(x, f"{at}attention_norm")
        q, k, v = (
            F.linear(h, w[f"{at}attention.w{n}.weight"]).unflatten(-1, (-1, c.head_dim)) for n in "qkv"
        )
        groups = c.n_heads // c.n_kv_heads
        q, k, v = rotate(q), rotate(k).repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + F.linear(out.transpose(1, 2).flatten(-2), w[f"{at}attention.wo.weight"])
        h = norm(x, f"{at}ffn_norm")
        gated = F.silu(F.linear(h, w[f"{at}feed_forward.w1.weight"]))
        gated = gated * F.linear(h, w[f"{at}feed_forward.w3.weight"])
        x = x + F.linear(gated, w[f"{at}feed_forward.w2.weight"])
    return F.linear(norm(x, "norm"), w["output.weight"])


def names_of_0_3(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with torchtitan 0.2's names under those of 0.3.0, which its trainer wrote on a CPU."""
    changes = {
        r"^output\.": "lm_head.",
        r"\.attention\.(w[qkv])\.": r".attention.qkv_linear.\1.",
        r"\.moe\.experts\.(w[13])$": r".moe.routed_experts.inner_experts.\1_EFD",
        r"\.moe\.experts\.w2$": ".moe.routed_experts.inner_experts.w2_EDF",
        r"\.expert_bias$": ".expert_bias_E",
    }
    for old, new in changes.items():
        w = {re.sub(old, new, name): tensor for name, tensor in w.items()}
    return w


def write_torchtitan(folder: Path, w: dict[str, torch.Tensor], release: str = "0.2") -> Path:
    """Save tensors with torchtitan 0.2's names as a release of torchtitan does: with DCP, weights at the top
    level (0.1: under `model`), other state beside them."""
    step = folder / "checkpoint" / "step-10"
    rest: dict[str, Any] = {
        "optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 0.1}]},
        "train_state": {"step": 10},
        "dataloader": {"dp_rank_0": pickle.dumps({"position": 3})},
        "lr_scheduler": {"last_epoch": 10},
    }
    if release == "0.3":
        fused = "layers.0.attention.qkv_linear.wqkv.weight"  # only the optimizer's state has the fused matrix
        rest["optimizer"] = {f"state.{fused}.exp_avg": torch.ones(4), f"param_groups.{fused}.lr": 0.1}
        w = names_of_0_3(w)
    dcp.save({**({"model": w} if release == "0.1" else w), **rest}, checkpoint_id=step, no_dist=True)
    return step


DIVIDED = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


def write_meta(
    folder: Path, w: dict[str, torch.Tensor], c: Llama3Config, files: int, embedding: int = 0
) -> Path:
    """Save as Meta does: each file has the shard of one tensor-parallel rank."""
    folder.mkdir()
    for i in range(files):
        part = {"rope.freqs": torch.ones(c.head_dim // 2)}
        for name, tensor in w.items():
            dim = DIVIDED.get(name.split(".")[-2])
            dim = embedding if name.startswith("tok") else dim
            part[name] = (tensor if dim is None else tensor.chunk(files, dim)[i]).clone()
        torch.save(part, folder / f"consolidated.{i:02}.pth")
    params = {"dim": c.dim, "n_layers": c.n_layers, "n_heads": c.n_heads, "n_kv_heads": c.n_kv_heads}
    params |= {"norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "use_scaled_rope": c.rope_factor != 1}
    (folder / "params.json").write_text(
        json.dumps({**params, "vocab_size": c.vocab_size, "multiple_of": 256})
    )
    return folder
