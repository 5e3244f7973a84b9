"""The default attention backend: the fastest that works."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.attention.base import AttentionBackend, AttentionNeeds
from titanlite.attention.flex import Flex
from titanlite.attention.head_tail import HeadTail
from titanlite.attention.sdpa import SDPA
from titanlite.attention.varlen import Varlen


@dataclass(frozen=True, kw_only=True)
class Auto(SDPA, name="auto"):
    """The first that works of: head_tail (context parallel without document masks), varlen, flex, sdpa.
    Sequences without masks are left to scaled_dot_product_attention."""

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        order = (
            (HeadTail, Varlen, Flex, SDPA) if self.sdpa_kernel in HeadTail.KERNELS else (Varlen, Flex, SDPA)
        )
        chosen = next(backend for backend in order if backend.works_on(needs))
        return chosen(sdpa_kernel=self.sdpa_kernel).build(needs)
