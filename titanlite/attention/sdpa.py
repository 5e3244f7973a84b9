"""Attention by torch's scaled_dot_product_attention: causal, or with a dense mask. Sinks and soft caps, which
it does not have, by a softmax that is written out."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from titanlite.attention.base import (
    SINKS,
    SOFT_CAP,
    Attention,
    AttentionBackend,
    AttentionKind,
    AttentionNeeds,
    document_numbers,
)
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.linear import LinearAttention
from titanlite.config.component import ConfigError
from titanlite.torch_compat import sdp_choice

KERNELS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}


class SDPAttention(Attention):
    """Attention with a mask, bool [B or 1, 1, queries, keys]: True where a query attends to a key. None:
    causal attention over whole sequences. `positions`: the positions of the queries and of the keys in the
    sequence, int64 [queries] and [keys], or with B in front; None: their indices. `soft_cap`: as in
    AttentionKind."""

    def __init__(
        self,
        mask: torch.Tensor | None = None,
        positions: tuple[torch.Tensor, torch.Tensor] | None = None,
        soft_cap: float = 0.0,
    ):
        self.mask, self.positions, self.soft_cap = mask, positions, soft_cap

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sinks_H is not None or self.soft_cap:
            return softmax_attention(q_BTHE, k_BTKE, v_BTKE, self.mask, self.soft_cap, sinks_H)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        out_BHTE = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out_BHTE.transpose(1, 2)

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        if kind.is_linear:
            return LinearAttention() if self.mask is None else super().of_kind(kind, tokens_BT)
        indices = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        queries, keys = self.positions or (indices, indices)
        if not 0 < kind.window < keys.shape[-1]:
            return SDPAttention(self.mask, self.positions, kind.soft_cap) if kind.soft_cap else self
        # Comparisons, which make bool tensors: distances of all pairs would need 8 bytes each.
        queries, keys = queries[..., None], keys[..., None, :]
        visible = queries >= keys if self.mask is None else self.mask
        in_window = (queries - kind.window < keys).unsqueeze(-3)
        mask = (visible & in_window).view(-1, *in_window.shape[-3:])
        return type(self)(mask, self.positions, kind.soft_cap)

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.mask is not None:
            return k_BTKE, self.mask[:, 0, queries]
        return k_BTKE, queries[None, :, None] >= torch.arange(k_BTKE.shape[1], device=queries.device)


CAUSAL = SDPAttention()


def softmax_attention(
    q_BTHE: torch.Tensor,
    k_BTKE: torch.Tensor,
    v_BTKE: torch.Tensor,
    mask: torch.Tensor | None,
    soft_cap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, as Attention.attend returns it, and a mask as SDPAttention has it.
    Scores and softmax in fp32, or in fp64 for inputs in fp64; keeps all scores in memory."""
    (T, E), (S, K) = q_BTHE.shape[1::2], k_BTKE.shape[1:3]
    dtype = torch.promote_types(q_BTHE.dtype, torch.float32)
    q_BKGTE = q_BTHE.to(dtype).unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4)
    k_BK1ES, v_BK1SE = (
        x.permute(0, 2, *dims)[:, :, None] for x, dims in ((k_BTKE, (3, 1)), (v_BTKE, (1, 3)))
    )
    scores_BKGTS = q_BKGTE @ k_BK1ES.to(dtype) / math.sqrt(E)
    if soft_cap:
        scores_BKGTS = soft_cap * torch.tanh(scores_BKGTS / soft_cap)
    if mask is None:
        mask = torch.ones(1, 1, T, S, dtype=torch.bool, device=q_BTHE.device).tril()
    scores_BKGTS = scores_BKGTS.masked_fill(~mask[:, :, None], -math.inf)
    if sinks_H is not None:
        column = sinks_H.to(dtype).view(K, -1, 1, 1).expand(*scores_BKGTS.shape[:-1], 1)
        scores_BKGTS = torch.cat((scores_BKGTS, column), -1)
    probabilities_BKGTS = scores_BKGTS.softmax(-1)[..., :S].to(v_BTKE.dtype)
    return (probabilities_BKGTS @ v_BK1SE).permute(0, 3, 1, 2, 4).flatten(2, 3)


class GatheredAttention(Attention):
    """Attention of this rank's queries over gathered keys and values. `attention` has the mask for the order
    of the gathered keys. `documents_BT` int32: the number of the document at each position of the whole
    sequences; None without document masks. `backend` makes the masks of layers with a window."""

    def __init__(
        self,
        attention: Attention,
        sharding: SequenceSharding,
        backend: SDPA,
        documents_BT: torch.Tensor | None,
    ):
        self.attention, self.sharding = attention, sharding
        self.backend, self.documents_BT = backend, documents_BT

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k_BTKE, v_BTKE = self.sharding.gather(k_BTKE), self.sharding.gather(v_BTKE)
        sinks = () if sinks_H is None else (sinks_H,)
        return self.attention.attend(q_BTHE, k_BTKE, v_BTKE, *sinks)

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        size = tokens_BT.shape[1] // 2  # of a chunk
        if 1 < kind.window <= size:
            attention = self.attention_in_chunks(kind, tokens_BT)
            return ChunkAttention(attention, self.sharding, kind.window, self.documents_BT)
        return GatheredAttention(
            self.attention.of_kind(kind, tokens_BT), self.sharding, self.backend, self.documents_BT
        )

    def attention_in_chunks(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        """Attention of `SequenceSharding.chunks` over `chunks_with_previous`, for keys of window - 1 tokens
        before a chunk."""
        (B, length), device, sharding = tokens_BT.shape, tokens_BT.device, self.sharding
        size, before = length // 2, kind.window - 1
        documents_BT = self.documents_BT
        if documents_BT is None:
            documents_BT = torch.zeros(B, length * sharding.size, dtype=torch.int32, device=device)
        numbers = torch.nn.functional.pad(documents_BT, (before, 0), value=-1)  # no token's document
        starts = [chunk * size for chunk in sharding.own_chunks]
        documents = torch.cat([numbers[:, start : start + before + size] for start in starts])
        positions = torch.arange(before + size, device=device)
        attention = self.backend.masked(positions[before:], positions, documents)
        return attention.of_kind(kind, torch.empty(2 * B, size, device="meta"))

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.attention.visible_keys(self.sharding.gather(k_BTKE), queries)


class ChunkAttention(Attention):
    """Attention of this rank's two chunks of each sequence with a sliding window, which reaches back into the
    chunk before only. `attention` has the mask. `documents_BT`: as in GatheredAttention."""

    def __init__(
        self,
        attention: Attention,
        sharding: SequenceSharding,
        window: int,
        documents_BT: torch.Tensor | None,
    ):
        self.attention, self.sharding = attention, sharding
        self.window, self.documents_BT = window, documents_BT

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sharding = self.sharding
        keys_and_values = sharding.chunks_with_previous(torch.cat((k_BTKE, v_BTKE), -1), self.window - 1)
        keys, values = keys_and_values.split((k_BTKE.shape[-1], v_BTKE.shape[-1]), -1)
        sinks = () if sinks_H is None else (sinks_H,)
        return sharding.joined(self.attention.attend(sharding.chunks(q_BTHE), keys, values, *sinks))

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        keys_BSKE = self.sharding.gather(k_BTKE)
        length, device = keys_BSKE.shape[1], queries.device
        positions = self.sharding.local_positions(length, device)[queries]
        gathered = self.sharding.gathered_positions(length, device)
        whole = SDPA().masked(positions, gathered, self.documents_BT)
        of_kind = whole.of_kind(AttentionKind(self.window), k_BTKE[..., 0, 0])
        return of_kind.visible_keys(keys_BSKE, torch.arange(len(queries), device=device))


@dataclass(frozen=True, kw_only=True)
class SDPA(AttentionBackend, name="sdpa"):
    """torch's scaled_dot_product_attention. Masks are dense: memory is quadratic in the sequence length, and
    on CUDA sdpa_kernel must allow a kernel that takes them. With attention sinks or a soft cap, all scores
    are in memory."""

    supports_window: ClassVar[bool] = True
    supports_sinks: ClassVar[bool] = True
    supports_soft_cap: ClassVar[bool] = True
    supports_v_head_dim: ClassVar[bool] = True
    sdpa_kernel: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Kernel of scaled_dot_product_attention on CUDA. `auto`: any; the slow `math`, which keeps all scores in
    memory, only where no other takes the model's shapes. The log names the kernel."""

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        self.check_softmax(needs)
        if (needs.masks or needs.changes_softmax) and not self.works_on(needs):
            choices = AttentionBackend.choices.values()
            backends = (b for b in choices if issubclass(b, SDPA) and b.supports_softmax(needs))
            working = ", ".join(b.name for b in backends if b.name != "auto" and b.works_on(needs))
            inputs = f"{str(needs.dtype).removeprefix('torch.')}, head_dim {needs.head_dim}"
            layout = " under context parallel" if needs.context_parallel else ""
            window = f" and a sliding window of {needs.window} tokens" if needs.has_effective_window else ""
            softmax = f" and {SINKS}" * needs.has_sinks + f" and {SOFT_CAP}" * needs.has_soft_cap
            raise ConfigError(
                f"{self.name!r} does not work on {needs.device.type} with {inputs}{window}{softmax}{layout}; "
                f"working backends: {working}",
                "attention.backend",
            )
        by_kind = [replace(needs, kinds=(kind,)) for kind in needs.kinds]
        by_sdpa = [of_kind for of_kind in by_kind if self.uses_sdpa(of_kind)]
        if needs.device.type == "cuda" and by_sdpa:
            allow_sdpa_kernels_for_the_life_of_the_process(self.allowed_kernels)
            try:
                for of_kind in by_sdpa:
                    self.kernel(of_kind)
            except ConfigError:
                if self.sdpa_kernel != "auto":
                    raise
                allow_sdpa_kernels_for_the_life_of_the_process({"math"})
        return self

    @property
    def allowed_kernels(self) -> Collection[str]:
        """The names of the kernels among which torch may choose, if one of them takes the shapes."""
        return set(KERNELS.values()) - {"math"} if self.sdpa_kernel == "auto" else {self.sdpa_kernel}

    def uses_sdpa(self, needs: AttentionNeeds) -> bool:
        """Whether training runs scaled_dot_product_attention. All backends do so without masks, sinks and
        soft caps."""
        return not needs.changes_softmax and (type(self) is SDPA or not needs.masks)

    def kernel(self, needs: AttentionNeeds) -> str:
        """The kernel that torch chooses among the kernels allowed in this process. Raises ConfigError if no
        kernel takes these shapes."""
        if not self.uses_sdpa(needs):
            return f"softmax on {needs.device.type}" if type(self) is SDPA else self.name
        if needs.device.type != "cuda":
            return f"sdpa on {needs.device.type}"
        q, k, v = example_inputs(needs, needs.seq_len)
        T, H, K = needs.seq_len, needs.n_heads, needs.n_kv_heads
        mask = torch.ones(1, 1, T, T, device=needs.device, dtype=torch.bool) if needs.masks else None
        choice = SDPBackend.ERROR.value
        with suppress(RuntimeError):  # raised if no kernel takes the inputs
            choice = sdp_choice(q, k, v, mask)
        if (name := KERNELS.get(SDPBackend(choice))) is None:
            mask_kind = "a dense mask" if needs.masks else "causal attention"
            values = f" and {needs.v_head_dim} of the values" if needs.has_other_values else ""
            raise ConfigError(
                f"{self.sdpa_kernel!r}: no kernel on this device for {mask_kind} in "
                f"{str(needs.dtype).removeprefix('torch.')}, {H} query and {K} key heads, head_dim "
                f"{needs.head_dim}{values}; `math` takes all shapes, but is slow and needs quadratic memory",
                "attention.sdpa_kernel",
            )
        return name

    def for_sequences(self, tokens_BT: torch.Tensor) -> Attention:
        return CAUSAL

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        positions_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)
        return self.masked(positions_T, positions_T, document_numbers(positions_BT))

    def for_context_parallel(
        self,
        sharding: SequenceSharding,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        num_documents: int,
    ) -> Attention:
        length, device = tokens_BT.shape[1], tokens_BT.device
        documents_BT = None if positions_BT is None else document_numbers(positions_BT)
        queries, keys = sharding.local_positions(length, device), sharding.gathered_positions(length, device)
        attention = self.masked(queries, keys, documents_BT)
        return GatheredAttention(attention, sharding, self, documents_BT)

    def masked(
        self, query_positions: torch.Tensor, key_positions: torch.Tensor, documents_BT: torch.Tensor | None
    ) -> Attention:
        """Causal attention of queries over keys, whose positions in the sequence are int64 [queries] and
        [keys]. `documents_BT` int32 [B, T]: the number of the document at each position; None without
        document masks."""
        visible = (query_positions[:, None] >= key_positions)[None]
        if documents_BT is not None:
            queries, keys = documents_BT[:, query_positions], documents_BT[:, key_positions]
            visible = visible & (queries[:, :, None] == keys[:, None, :])
        return SDPAttention(visible[:, None], (query_positions, key_positions))


def allow_sdpa_kernels_for_the_life_of_the_process(kernels: Collection[str]) -> None:
    """Switch off all other kernels of scaled_dot_product_attention, in this process and until it ends. torch
    has no narrower switch that compiled blocks respect."""
    for name, enable in {
        "flash": torch.backends.cuda.enable_flash_sdp,
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }.items():
        enable(name in kernels)


def example_inputs(needs: AttentionNeeds, length: int) -> list[torch.Tensor]:
    """Queries, keys and values [1, heads, length, E], for asking torch which kernels take such tensors."""
    options: Any = {"device": needs.device, "dtype": needs.dtype, "requires_grad": True}
    q, k = (needs.n_heads, needs.head_dim), (needs.n_kv_heads, needs.head_dim)
    v = (needs.n_kv_heads, needs.v_head_dim or needs.head_dim)
    return [torch.empty(1, heads, length, dim, **options) for heads, dim in (q, k, v)]
