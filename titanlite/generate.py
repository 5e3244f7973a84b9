"""Sampling text from a model, whole or sharded: one loop over a function that gives the next token's logits.

A sharded model runs the whole sequence for each token, padded at the end to its final length, so that all
forwards have one shape; causal attention never sees the padding. All ranks use the same seed, compute the
same tokens and run the same number of forwards. A model on one device runs only the new tokens, with a cache
of keys and values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from titanlite.attention.kv_cache import KVCache
from titanlite.config.amount import Interval
from titanlite.config.component import ConfigError, check_at_least
from titanlite.errors import Diverged
from titanlite.models.base import Decoder
from titanlite.tokenizers.base import Tokenizer

NextLogits = Callable[[Sequence[int]], torch.Tensor]  # ids of the sequence -> logits of the next token [V]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Text sampled during training, into <dump_folder>/samples.txt."""

    prompts: list[str] = field(default_factory=list)
    """Prompts, one sample each; empty: no samples. Prompt i = 0, 1, ... has the seed training.seed + i."""
    freq: Interval = 0
    """Steps between samples; 0: only after the last step."""
    max_new_tokens: int = 64
    """Most tokens after the prompt."""
    temperature: float = 0.7
    """Sampling temperature; 0: always the most likely token."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""

    def __post_init__(self) -> None:
        if self.freq < 0:
            raise ConfigError(f"{self.freq} is below 0; 0: at the end only", "freq")
        check_at_least(self, 1, "max_new_tokens")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"{self.temperature} is not 0 or above, and finite", "temperature")
        check_at_least(self, 0, "top_k")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"{self.top_p} is not above 0 and at most 1", "top_p")

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` has samples."""
        is_step = step == last_step or (self.freq > 0 and step % self.freq == 0)
        return bool(self.prompts) and is_step


def generate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    tokenizer: Tokenizer,
    prompt: str,
    config: Generation,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and its continuation by the model, up to the first stop id of the tokenizer. `logits`: int64
    [1, T] -> [1, T, V]."""
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    next_logits = uncached_logits(logits, len(ids) + config.max_new_tokens, tokenizer.eos, device)
    new_ids = list(next_tokens(next_logits, ids, config, tokenizer.vocab_size, seed))
    return prompt + text_after(prompt, before_any(new_ids, tokenizer.stop_ids), tokenizer)


def next_tokens(
    next_logits: NextLogits, prompt: Sequence[int], config: Generation, vocab_size: int, seed: int
) -> Iterator[int]:
    """The ids of config.max_new_tokens tokens after the prompt. Raises Diverged, on all ranks, if logits are
    not finite."""
    generator, sequence = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(config.max_new_tokens):
        logits_V = next_logits(sequence)[:vocab_size].float().cpu()
        if not logits_V.isfinite().all():
            raise Diverged("no text can be sampled: the model's logits are not finite")
        sequence.append(choose(logits_V, config, generator))
        yield sequence[-1]


def choose(logits_V: torch.Tensor, config: Generation, generator: torch.Generator) -> int:
    """Sample a token id. The temperature is applied first, then top_k, then top_p to the remaining tokens."""
    if config.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / config.temperature
    if 0 < config.top_k < len(logits_V):
        smallest = logits_V.topk(config.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -math.inf)
    if config.top_p < 1:
        ordered, ids = torch.softmax(logits_V, dim=-1).sort(descending=True)
        likelier = ordered.cumsum(-1) - ordered  # total probability of the tokens that are more likely
        logits_V = logits_V.index_fill(0, ids[likelier >= config.top_p], -math.inf)
    return int(torch.multinomial(torch.softmax(logits_V, dim=-1), 1, generator=generator))


def text_after(prompt: str, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of ids that follow the prompt, which may be empty."""
    return tokenizer.decode_continuation(ids) if prompt else tokenizer.decode(ids)


def before_any(ids: Sequence[int], stop_ids: Collection[int]) -> Sequence[int]:
    """The ids before the first stop id."""
    return list(itertools.takewhile(lambda token: token not in stop_ids, ids))


def uncached_logits(
    logits: Callable[[torch.Tensor], torch.Tensor], length: int, filler: int, device: torch.device
) -> NextLogits:
    """A function of next-token logits that runs the whole sequence, padded with `filler` to `length`.
    `logits`: int64 [1, T] -> [1, T, V]."""

    def next_logits(ids: Sequence[int]) -> torch.Tensor:
        padded = [*ids, *[filler] * (length - len(ids))]
        return logits(torch.tensor([padded], device=device))[0, len(ids) - 1]

    return next_logits


class CachedLogits:
    """Next-token logits of a model that is whole on one device. A call runs only the tokens that are new
    since the last call, with a cache of keys and values. `length`: maximum number of tokens of the
    sequence."""

    def __init__(self, net: Decoder, length: int, device: torch.device):
        self.net, self.device = net, device
        self._cache = KVCache(length)

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] of the token after `ids`. `ids` have to begin with the ids of the last call."""
        tokens = torch.tensor([ids[self._cache.filled :]], device=self.device)
        positions = self._cache.advance(tokens.shape[1], self.device)
        return self.net(tokens, positions, self._cache, self._last_token_logits)[0, 0]

    def _last_token_logits(self, hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """The head_fn that computes only the logits of each sequence's last token, [B, 1, V]."""
        return self.net.logits(hidden_BTD[:, -1:], weight_VD)
