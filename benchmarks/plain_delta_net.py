"""A plain training loop around flash-linear-attention's own layer, with the shape of a Qwen3.5: what
layer_kinds.py compares titanlite's gated delta nets with. Prints one line of JSON.

    python benchmarks/plain_delta_net.py --flavor 0.8B --seq-len 8192 --batch 4 --steps 14 --skip 6
        [--checkpoint-blocks]

Needs a GPU and the packages flash-linear-attention and einops. The weights are fp32 under autocast to bf16,
the optimizer is AdamW in one kernel, the loss is the package's, which makes logits in chunks, and all is
compiled that torch.compile can trace: the layers of full attention, and the MLPs of the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from titanlite.models.qwen3_5 import FLAVORS, Qwen3_5Config  # noqa: E402


class Attention(nn.Module):
    """Full attention with normalised queries and keys, rotary positions for some dims, and a gate."""

    def __init__(self, c: Qwen3_5Config):
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.dim, 2 * c.n_heads * c.head_dim, bias=False)
        self.k, self.v = (nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps), nn.RMSNorm(c.head_dim, c.norm_eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = x.split((self.c.rope_head_dim, self.c.head_dim - self.c.rope_head_dim), dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, gate = self.q(x).unflatten(-1, (self.c.n_heads, 2 * self.c.head_dim)).chunk(2, dim=-1)
        k, v = (linear(x).unflatten(-1, (self.c.n_kv_heads, self.c.head_dim)) for linear in (self.k, self.v))
        q, k = self.rotate(self.q_norm(q), cos, sin), self.rotate(self.k_norm(k), cos, sin)
        q, k, v = (y.to(x.dtype if x.dtype != torch.float32 else gate.dtype) for y in (q, k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o((out.transpose(1, 2) * gate.sigmoid()).flatten(-2))


class Delta(nn.Module):
    """The package's layer."""

    def __init__(self, c: Qwen3_5Config):
        super().__init__()
        from fla.layers import GatedDeltaNet

        self.layer = GatedDeltaNet(
            hidden_size=c.dim, head_dim=c.delta_k_head_dim, num_heads=c.delta_n_k_heads,
            num_v_heads=c.delta_n_v_heads, expand_v=c.delta_v_head_dim / c.delta_k_head_dim,
            conv_size=c.delta_conv_width, norm_eps=c.norm_eps,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class MLP(nn.Module):
    """SwiGLU of the normalised input, and the input."""

    def __init__(self, c: Qwen3_5Config):
        super().__init__()
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.gate, self.up = (nn.Linear(c.dim, c.hidden_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(c.hidden_dim, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Block(nn.Module):
    """A layer of one kind, and its MLP."""

    def __init__(self, c: Qwen3_5Config, letter: str):
        super().__init__()
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.mixer = Delta(c) if letter == "D" else Attention(c)
        self.mlp = MLP(c)
        (self.mlp if letter == "D" else self).compile()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.mixer(self.norm(x), cos, sin))


class Model(nn.Module):
    """Embedding, blocks, norm, and the loss with the tied embedding."""

    def __init__(self, c: Qwen3_5Config, seq_len: int, checkpoint_blocks: bool):
        super().__init__()
        from fla.modules import FusedLinearCrossEntropyLoss

        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        letters = (c.layer_pattern * c.n_layers)[: c.n_layers]
        self.blocks = nn.ModuleList(Block(c, letter) for letter in letters)
        self.norm, self.loss = nn.RMSNorm(c.dim, c.norm_eps), FusedLinearCrossEntropyLoss()
        self.checkpoint_blocks = checkpoint_blocks
        half = c.rope_head_dim // 2
        angles = torch.arange(seq_len)[:, None] * c.rope_theta ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", angles.sin()[:, None])

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs).bfloat16()
        for block in self.blocks:
            if self.checkpoint_blocks:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return self.loss(self.norm(x).bfloat16(), targets, self.embedding.weight.bfloat16())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flavor", choices=sorted(FLAVORS), default="0.8B")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--skip", type=int, default=6)
    parser.add_argument("--checkpoint-blocks", action="store_true")
    options = parser.parse_args()
    c = FLAVORS[options.flavor]
    torch.manual_seed(0)
    model = Model(c, options.seq_len, options.checkpoint_blocks).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    times, losses = [], []
    for _ in range(options.steps):
        ids = torch.randint(c.vocab_size, (options.batch, options.seq_len + 1), device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[options.skip :])
    result = {
        "parameters": sum(p.numel() for p in model.parameters()), "step_s": times, "losses": losses,
        "tokens_per_s": options.batch * options.seq_len / step_s,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
