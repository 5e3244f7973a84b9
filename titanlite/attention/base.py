"""Attention behind one call, `causal_attention`, and the masks that keep the documents of a row apart.

Without a mask it is torch's scaled_dot_product_attention, causal within the row. A mask's type says which
kernel reads it. Shape suffixes: B batch, T tokens, H query heads, K key/value heads (H is a multiple of K), E
head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from titanlite.attention.kv_cache import Cache
from titanlite.attention.pieces import attention_of_pieces
from titanlite.config.component import ConfigError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Lengths(NamedTuple):
    """Documents as the varlen kernel wants them: `ends` int32 [N + 1], cumulative over the batch's B * T
    tokens (trailing documents may be empty), and the longest that one can be."""

    ends: torch.Tensor
    longest: int


class Gathered(NamedTuple):
    """For a rank that has a part of each row's tokens (context parallel): `gather` makes the keys, or the
    values, of all tokens from its own, and `mask` is of its queries and all keys."""

    gather: Callable[[torch.Tensor], torch.Tensor]
    mask: torch.Tensor | BlockMask


class Pieces(NamedTuple):
    """The same without documents: its tokens are the pieces number `first` and `last` of a row, and `gather`
    makes all keys, or values, in order."""

    gather: Callable[[torch.Tensor], torch.Tensor]
    first: int
    last: int


# bool [B, 1, T, T] is for scaled_dot_product_attention, the others for the kernels they are named after;
# Gathered and Cache have keys of more tokens than there are queries, and a mask of the former kinds
Mask = Union[torch.Tensor, "BlockMask", Lengths, Gathered, Pieces, Cache]


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """Attention's kernels."""

    backend: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """For rows whose documents are masked from each other (data.mask_documents) or whose tokens are divided
    (parallelism.context_parallel_degree). `varlen`: FlashAttention over documents, CUDA and bf16 or fp16
    only, of whole rows. `flex`: FlexAttention, compiled, CUDA only. `sdpa`: a dense mask, quadratic in
    memory; on CUDA sdpa_kernel has to have a kernel for it. `auto`: the first of these that works; for
    divided rows without masks cuDNN piece by piece, which is faster for long ones, where that works."""
    sdpa_kernel: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """On CUDA, the kernel of scaled_dot_product_attention. `auto`: torch's choice, but never `math`, which
    writes out all scores: that is only taken when it is asked for."""

    def choose(self, device: torch.device, dtype: torch.dtype, gathered: bool = False) -> str:
        """The kernel's name. Raises ConfigError for one that `device` and `dtype` do not have, or that cannot
        mask `gathered` keys."""
        works = {
            "varlen": not gathered
            and device.type == "cuda"
            and dtype in (torch.bfloat16, torch.float16)
            and _load_varlen(),
            "flex": device.type == "cuda",
            "sdpa": True,
        }
        if self.backend == "auto":
            return next(name for name, does in works.items() if does)
        if not works[self.backend]:
            right = ", ".join(name for name, does in works.items() if does)
            raise ConfigError(
                f"{self.backend!r} does not work on {device.type} with {str(dtype).removeprefix('torch.')} "
                f"(these do: {right})",
                "attention.backend",
            )
        return self.backend

    def fix_kernel(
        self,
        device: torch.device,
        dtype: torch.dtype,
        masked: bool,
        shape: tuple[int, int, int, int],
        gathered: bool = False,
    ) -> str:
        """The name of the kernel that a training step will take, for queries of `shape` (T, H, K, E). If it
        is one of scaled_dot_product_attention's, that is left none but those that `sdpa_kernel` allows, for
        the life of the process; raises ConfigError if there is none."""
        if gathered and not masked and self._in_pieces(device, dtype, shape):
            return "pieces"
        if (masked or gathered) and (backend := self.choose(device, dtype, gathered)) != "sdpa":
            return backend
        masked = masked or gathered
        if device.type != "cuda":
            return f"sdpa on {device.type}"
        switches = {
            "flash": torch.backends.cuda.enable_flash_sdp,
            "cudnn": torch.backends.cuda.enable_cudnn_sdp,
            "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
            "math": torch.backends.cuda.enable_math_sdp,
        }
        for name, enable in switches.items():
            enable(self.sdpa_kernel == name or (self.sdpa_kernel == "auto" and name != "math"))
        T, H, K, E = shape
        q, k, v = (torch.empty(1, n, T, E, device=device, dtype=dtype, requires_grad=True) for n in (H, K, K))
        mask = torch.ones(1, 1, T, T, device=device, dtype=torch.bool) if masked else None
        choice = SDPBackend.ERROR.value
        with suppress(RuntimeError):  # which says that there is none
            choice = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=H != K)
        found = {
            SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cudnn",
            SDPBackend.EFFICIENT_ATTENTION: "efficient", SDPBackend.MATH: "math",
        }.get(SDPBackend(choice))  # fmt: skip
        if found is None:
            what = "a dense mask" if masked else "causal attention"
            raise ConfigError(
                f"{self.sdpa_kernel!r}: no kernel on this device for {what} in "
                f"{str(dtype).removeprefix('torch.')}, {H} heads on {K}, head_dim {E}; `math` has no limits, "
                "but is slow and quadratic in memory",
                "attention.sdpa_kernel",
            )
        return found

    def _in_pieces(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> bool:
        """Whether `attention_of_pieces` has a kernel here, and is not asked to have another."""
        if self.backend != "auto" or self.sdpa_kernel not in ("auto", "cudnn"):
            return False
        if device.type != "cuda":
            return True
        T, H, K, E = shape
        T = min(T, 1024)  # which is not what decides
        q, k, v = (torch.empty(1, n, T, E, device=device, dtype=dtype, requires_grad=True) for n in (H, K, K))
        asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, H != K)
        return torch.backends.cuda.can_use_cudnn_attention(asked)


def document_mask(backend: str, positions: torch.Tensor, num_documents: int) -> Mask:
    """The mask for `positions` int64 [B, T], which start from 0 in each document and at each row's beginning.

    `num_documents`: how many there are, known on the host: nothing here waits for the device.
    """
    B, T = positions.shape
    if backend == "varlen":
        _load_varlen()
        capacity = 1 << (num_documents - 1).bit_length()  # few sizes, few recompilations
        flat = positions.flatten() == 0
        starts = torch.nonzero_static(flat, size=capacity, fill_value=B * T).flatten()
        return Lengths(F.pad(starts.to(torch.int32), (0, 1), value=B * T), T)
    document = (positions == 0).cumsum(dim=-1, dtype=torch.int32)
    if backend == "flex":

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (q >= k) & (document[b, q] == document[b, k])

        return _block_mask(sees, B, T, T, positions.device)
    causal = torch.ones((T, T), dtype=torch.bool, device=positions.device).tril()
    return (document[:, :, None] == document[:, None, :])[:, None] & causal


def part_mask(
    backend: str, here: torch.Tensor, there: torch.Tensor, document: torch.Tensor | None
) -> torch.Tensor | BlockMask:
    """The causal mask for queries and keys at these places of a row, int64 [Q] and [T]; `document` int32
    [B, T]: which document each place is in, if they are masked from each other."""
    if backend == "flex":

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            before = here[q] >= there[k]
            return before if document is None else before & (document[b, here[q]] == document[b, there[k]])

        B = None if document is None else len(document)
        return _block_mask(sees, B, len(here), len(there), here.device)
    before = here[:, None] >= there
    if document is None:
        return before[None, None]
    return (document[:, here, None] == document[:, None, there])[:, None] & before


def causal_attention(
    q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor, mask: Mask | None = None
) -> torch.Tensor:
    """Each token attends to itself and the tokens before it that `mask` leaves: [B, T, H, E]."""
    gqa = q_BTHE.shape[2] != k_BTKE.shape[2]
    if isinstance(mask, Pieces):
        k_BTKE, v_BTKE = mask.gather(k_BTKE), mask.gather(v_BTKE)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        return attention_of_pieces(q, k, v, mask.first, mask.last)[0].transpose(1, 2)
    if isinstance(mask, Gathered):
        k_BTKE, v_BTKE, mask = mask.gather(k_BTKE), mask.gather(v_BTKE), mask.mask
    if isinstance(mask, Cache):
        k_BTKE, v_BTKE, mask = mask.extend(k_BTKE, v_BTKE)
    if isinstance(mask, Lengths):
        q, k, v = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, v_BTKE))
        options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
        if gqa and _varlen_asks_for_gqa:
            options["enable_gqa"] = True
        out: Any = _varlen(q, k, v, mask.ends, mask.ends, mask.longest, mask.longest, **options)
        return out.unflatten(0, q_BTHE.shape[:2])
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    if mask is None or isinstance(mask, torch.Tensor):
        out_BHTE = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa
        )
    else:
        out_BHTE = _flex(q, k, v, block_mask=mask, enable_gqa=gqa)
    return out_BHTE.transpose(1, 2)


# Loaded when a run may want them, on CUDA, or a mask does: with them come the compiler and two seconds.
_varlen: Any = None
_varlen_asks_for_gqa = False  # torch 2.11 takes fewer key heads without being told
_flex: Any = None
_create_block_mask: Any = None


def _load_varlen() -> bool:
    """Whether there is such a kernel."""
    global _varlen, _varlen_asks_for_gqa
    if _varlen is not None:
        return True
    with suppress(ImportError):  # not on every platform
        from torch.nn.attention.varlen import varlen_attn

        _varlen = varlen_attn
        _varlen_asks_for_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return _varlen is not None


def _block_mask(sees: Any, B: int | None, Q: int, K: int, device: torch.device) -> BlockMask:
    global _flex, _create_block_mask
    if _flex is None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Uncompiled, both write out [B, H, Q, K]; within a compiled block the inner compile is part of it.
        _flex, _create_block_mask = torch.compile(flex_attention), torch.compile(create_block_mask)
    return _create_block_mask(sees, B, None, Q, K, device=device)
