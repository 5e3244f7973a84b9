"""The default attention backend, which chooses the fastest backend that works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.attention.base import AttentionBackend, AttentionNeeds
from titanlite.attention.flash_attention_4 import FlashAttention4
from titanlite.attention.flex import Flex
from titanlite.attention.head_tail import HeadTail
from titanlite.attention.sdpa import SDPA
from titanlite.attention.varlen import Varlen


@dataclass(frozen=True, kw_only=True)
class Auto(SDPA, name="auto"):
    """The first backend that works of flash_attention_4 (if it is installed, where it was measured as
    fastest: on Hopper, without masks, with sequences of 4096 tokens or more for a head_dim of 64 and of 16384
    for 128), head_tail (context parallel without document masks and without a sliding window), varlen, flex
    and sdpa. Without masks and without context parallel, the last four run scaled_dot_product_attention."""

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        chosen = next(backend for backend in self._fastest_first(needs) if backend.works_on(needs))
        return chosen(sdpa_kernel=self.sdpa_kernel).build(needs)

    def _fastest_first(self, needs: AttentionNeeds) -> Iterator[type[SDPA]]:
        if self.sdpa_kernel == "auto" and FlashAttention4.is_fastest(needs):
            yield FlashAttention4
        if self.sdpa_kernel in HeadTail.KERNELS:
            yield HeadTail
        yield from (Varlen, Flex, SDPA)
