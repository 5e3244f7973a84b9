"""Sampling text from a model, whole or sharded: one loop, over a function of the sequence so far.

Every rank computes the same tokens from the same seed and takes the same number of forwards, so a sharded
model samples in lockstep. It runs the whole sequence, padded to its final length: one shape for all forwards,
and causal attention never looks right. A model on one device keeps keys and values and computes what is new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from titanlite.attention.kv_cache import KVCache
from titanlite.config.component import ConfigError
from titanlite.errors import Diverged
from titanlite.models.base import Decoder, logits
from titanlite.tokenizers.base import Tokenizer

NextLogits = Callable[[Sequence[int]], torch.Tensor]  # ids of the sequence so far -> logits of the next [V]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Samples taken while training, written to <dump_folder>/samples.txt."""

    prompts: list[str] = field(default_factory=list)
    """One sample for each; empty: none. Prompt i = 0, 1, ... is sampled with the seed training.seed + i."""
    freq: int = 0
    """Number of steps between samples; 0: only at the end."""
    max_new_tokens: int = 64
    """Maximum number of tokens after the prompt."""
    temperature: float = 0.7
    """Sampling temperature. 0 takes the likeliest token; higher is more random."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens only; 0: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens only that together have this probability; 1: from all."""

    def __post_init__(self) -> None:
        if self.freq < 0:
            raise ConfigError(f"{self.freq} is below 0; 0: at the end only", "freq")
        if self.max_new_tokens < 1:
            raise ConfigError(f"{self.max_new_tokens} is below 1", "max_new_tokens")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"{self.temperature} is not 0 or above, and finite", "temperature")
        if self.top_k < 0:
            raise ConfigError(f"{self.top_k} is below 0", "top_k")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"{self.top_p} is not above 0 and at most 1", "top_p")


def generate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    tokenizer: Tokenizer,
    prompt: str,
    config: Generation,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and its continuation by the model, up to the first id that ends a text. `logits`: int64 [1,
    T] -> [1, T, V]."""
    start = [tokenizer.bos, *tokenizer.encode(prompt)]
    next_logits = uncached_logits(logits, len(start) + config.max_new_tokens, tokenizer.eos, device)
    made = list(next_tokens(next_logits, start, config, tokenizer.vocab_size, seed))
    return prompt + tokenizer.decode(before_any(made, tokenizer.stop_ids))


def next_tokens(
    next_logits: NextLogits, prompt: Sequence[int], config: Generation, vocab_size: int, seed: int
) -> Iterator[int]:
    """The tokens after the prompt, max_new_tokens of them. Raises Diverged, on all ranks, if logits are not
    finite."""
    generator, sequence = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(config.max_new_tokens):
        logits_V = next_logits(sequence)[:vocab_size].float().cpu()
        if not logits_V.isfinite().all():
            raise Diverged("no text can be sampled: the model's logits are not finite")
        sequence.append(choose(logits_V, config, generator))
        yield sequence[-1]


def choose(logits_V: torch.Tensor, config: Generation, generator: torch.Generator) -> int:
    """A token by its logit: temperature first, then top_k, then top_p of what is left."""
    if config.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / config.temperature
    if 0 < config.top_k < len(logits_V):
        least = logits_V.topk(config.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -math.inf)
    if config.top_p < 1:
        ordered, places = torch.softmax(logits_V, dim=-1).sort(descending=True)
        likelier = ordered.cumsum(-1) - ordered  # the probability of all likelier tokens together
        logits_V = logits_V.index_fill(0, places[likelier >= config.top_p], -math.inf)
    return int(torch.multinomial(torch.softmax(logits_V, dim=-1), 1, generator=generator))


def before_any(ids: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    """The ids before the first one that is among `ends`."""
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]


def uncached_logits(
    logits: Callable[[torch.Tensor], torch.Tensor], length: int, filler: int, device: torch.device
) -> NextLogits:
    """Next-token logits by forwards of the whole sequence, padded to `length`. `logits`: int64 [1, T] -> [1,
    T, V]."""

    def next_logits(ids: Sequence[int]) -> torch.Tensor:
        padded = [*ids, *[filler] * (length - len(ids))]
        return logits(torch.tensor([padded], device=device))[0, len(ids) - 1]

    return next_logits


class CachedLogits:
    """Next-token logits by forwards of the tokens that are new since the last call, with a cache of keys and
    values, of a model that is whole on one device. `length`: maximum number of tokens of the sequence."""

    def __init__(self, net: Decoder, length: int, device: torch.device):
        self.net, self.device = net, device
        self._cache = KVCache(length)

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] of the token after `ids`, which begin with the ids of the last call."""
        tokens = torch.tensor([ids[self._cache.filled :]], device=self.device)
        positions = self._cache.advance(tokens.shape[1], self.device)
        return self.net(tokens, positions, self._cache, last_token_logits)[0, 0]


def last_token_logits(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """The head_fn that makes the logits of the last token of each sequence only, [B, 1, V]."""
    return logits(hidden_BTD[:, -1:], weight_VD)
