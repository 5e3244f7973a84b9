"""The default attention backend, which chooses the fastest backend that works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from titanlite.attention.base import AttentionBackend, AttentionNeeds
from titanlite.attention.flex import Flex
from titanlite.attention.head_tail import HeadTail
from titanlite.attention.sdpa import SDPA
from titanlite.attention.varlen import Varlen


@dataclass(frozen=True, kw_only=True)
class Auto(SDPA, name="auto"):
    """The first that works of head_tail, varlen, flex and sdpa. Without masks, sinks and soft caps, all
    backends run scaled_dot_product_attention."""

    linear_memory: ClassVar[bool] = True

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        head_tail = [HeadTail] if self.sdpa_kernel in HeadTail.KERNELS else []
        backends = [b for b in (*head_tail, Varlen, Flex, SDPA) if b.supports_softmax(needs)]
        chosen = next(backend for backend in backends if backend.works_on(needs))
        return chosen(sdpa_kernel=self.sdpa_kernel).build(needs)
