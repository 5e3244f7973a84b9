"""The default attention backend, which chooses the fastest backend that works, for each kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from titanlite.attention.base import Attention, AttentionBackend, AttentionKind, AttentionNeeds
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.flex import Flex
from titanlite.attention.head_tail import HeadTail
from titanlite.attention.sdpa import SDPA
from titanlite.attention.varlen import Varlen


@dataclass(frozen=True, kw_only=True)
class Auto(SDPA, name="auto"):
    """For each kind of layer the first that works of head_tail, varlen, flex and sdpa. Without masks, sinks
    and soft caps, all backends run scaled_dot_product_attention."""

    linear_memory: ClassVar[bool] = True

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        by_kind = {kind: replace(needs, kinds=(kind,)) for kind in needs.kinds}
        chosen = {kind: self._chosen(own) for kind, own in by_kind.items()}
        if len(set(chosen.values())) == 1:
            return next(iter(chosen.values())).build(needs)
        backends = {kind: chosen[kind].build(own) for kind, own in by_kind.items()}
        kept_ops = {name for backend in backends.values() for name in backend.kept_ops}
        return ByKind(backends=backends, kept_ops=tuple(sorted(kept_ops)))

    def _chosen(self, needs: AttentionNeeds) -> AttentionBackend:
        head_tail = [HeadTail] if self.sdpa_kernel in HeadTail.KERNELS else []
        backends = [b for b in (*head_tail, Varlen, Flex, SDPA) if b.supports_softmax(needs)]
        chosen = next(backend for backend in backends if backend.works_on(needs))
        return chosen(sdpa_kernel=self.sdpa_kernel)


@dataclass(frozen=True, kw_only=True)
class ByKind(AttentionBackend):
    """The built backends of a model whose kinds of layers need several."""

    name: ClassVar[str] = "auto"
    backends: dict[AttentionKind, AttentionBackend]
    kept_ops: tuple[str, ...]  # type: ignore[misc]

    def kernel(self, needs: AttentionNeeds) -> str:
        return ", ".join(self.backends[kind].kernel(replace(needs, kinds=(kind,))) for kind in needs.kinds)

    def for_sequences(self, tokens_BT: torch.Tensor) -> Attention:
        return AttentionByKind(self.backends, lambda backend: backend.for_sequences(tokens_BT))

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        return AttentionByKind(self.backends, lambda b: b.for_documents(positions_BT, num_documents))

    def for_context_parallel(
        self,
        sharding: SequenceSharding,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        num_documents: int,
    ) -> Attention:
        return AttentionByKind(
            self.backends,
            lambda b: b.for_context_parallel(sharding, tokens_BT, positions_BT, num_documents),
        )


class AttentionByKind(Attention):
    """Attention of which each kind has its backend. `make`: makes the attention of a backend for the
    micro-batch."""

    def __init__(
        self,
        backends: dict[AttentionKind, AttentionBackend],
        make: Callable[[AttentionBackend], Attention],
    ):
        self._backends, self._make = backends, make

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        return self._make(self._backends[kind]).of_kind(kind, tokens_BT)
