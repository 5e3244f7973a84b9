"""Sampling text from a model, whole or sharded.

Every rank computes the same tokens from the same seed and takes the same number of forwards, so a sharded
model samples in lockstep. The row is padded to its final length once: one shape for compile, and causal
attention never looks right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from titanlite.config.component import ConfigError
from titanlite.data.tokenizer import TextCodec


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Samples taken while training, written to <dump_folder>/samples.txt."""

    prompts: list[str] = field(default_factory=list)
    """One sample for each; empty: none."""
    freq: int = 0
    """Steps between samples; 0: only at the end."""
    max_new_tokens: int = 64
    """Tokens after the prompt, at most."""
    temperature: float = 0.7
    """0 takes the likeliest token; higher is more random."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"{self.max_new_tokens} is below 1", "max_new_tokens")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"{self.temperature} is not 0 or above, and finite", "temperature")


def generate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    codec: TextCodec,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and what the model makes of it, up to its first EOS. `logits`: int64 [1, T] -> [1, T, V]."""
    start = [codec.bos, *codec.encode(prompt)]
    tokens = torch.tensor([start + [codec.eos] * max_new_tokens], device=device)
    generator = torch.Generator().manual_seed(seed)
    for t in range(len(start), tokens.shape[1]):
        row = logits(tokens)[0, t - 1, : codec.vocab_size].float().cpu()
        if temperature == 0:
            choice = row.argmax()
        else:
            choice = torch.multinomial(torch.softmax(row / temperature, dim=-1), 1, generator=generator)[0]
        tokens[0, t] = choice.to(device)
    made = tokens[0, len(start) :].tolist()
    if codec.eos in made:
        made = made[: made.index(codec.eos)]
    return prompt + codec.decode(made)
