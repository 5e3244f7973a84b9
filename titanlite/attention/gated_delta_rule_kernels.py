"""The two implementations of the gated delta rule behind one interface, `Rule`: torch's, and the Triton
kernels of flash-linear-attention (github.com/fla-org/flash-linear-attention, the package fla-core) for CUDA.

The extra `linear-attention` asks for the package's release 0.6: its functions for the forward and the
backward are not documented, so that they may change with any release. Of the releases 0.4.2, 0.5.2 and 0.6.0,
only 0.6.0 takes `chunk_indices`, without which it computes them from `cu_seqlens` and waits for the GPU.

The kernels compute the products of bf16 or fp16 inputs with fp32 sums; the reference computes all in fp32.
They choose their block sizes by timing them, so that two processes may differ in their last bits.

Shape suffixes as in gated_delta_rule.py; M documents in a micro-batch.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from titanlite.attention.gated_delta_rule import (
    CHUNK_SIZE,
    gated_delta_rule,
    l2_normalized,
    recurrent_gated_delta_rule,
)
from titanlite.config.component import ConfigError
from titanlite.torch_compat import mark_dynamic

FLA_VERSIONS = ((0, 6), (0, 7))  # from the first, below the second
WRONG_ON_HOPPER = ((3, 4), (3, 7, 1))  # Triton from the first, below the second: fla issue 640


class Documents(NamedTuple):
    """The documents of a micro-batch of packed sequences, for all layers. `starts` bool [B, T]: True at the
    first token of each document. `cu_seqlens` int64 [M + 1]: the index among the B T tokens at which each
    document or sequence begins, then B T. `chunk_indices` int64 [chunks, 2]: for each chunk of 64 tokens, its
    document and its number in the document. The last documents may be empty, and may have chunks."""

    starts: torch.Tensor
    cu_seqlens: torch.Tensor
    chunk_indices: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor, num_documents: int) -> Documents:
        """The documents with these first tokens. `num_documents`: an upper bound of the number of documents
        and of sequences that begin within a document, known on the host, so that this does not wait for the
        device."""
        B, T = starts.shape
        num_documents = 1 << num_documents.bit_length()  # above it, and few sizes
        is_start = starts.clone()
        is_start[:, 0] = True
        indices = torch.nonzero_static(is_start.flatten(), size=num_documents, fill_value=B * T).flatten()
        cu_seqlens = F.pad(indices, (0, 1), value=B * T)
        ends = ((cu_seqlens.diff() + CHUNK_SIZE - 1) // CHUNK_SIZE).cumsum(0)  # of the documents, in chunks
        chunks = torch.arange(B * T // CHUNK_SIZE + num_documents, device=starts.device)
        document = torch.searchsorted(ends, chunks, right=True).clamp(max=num_documents - 1)
        number = chunks - F.pad(ends, (1, 0))[document]
        documents = cls(starts, cu_seqlens, torch.stack((document, number), dim=1))
        for x in documents[1:]:
            mark_dynamic(x, 0)  # one graph of a compiled block serves all numbers of documents
        return documents


class RuleInputs(NamedTuple):
    """The inputs of the gated delta rule for each token. Queries and keys are not normalised yet."""

    q_BTKE: torch.Tensor
    k_BTKE: torch.Tensor
    v_BTHV: torch.Tensor
    log_decay_BTH: torch.Tensor
    beta_BTH: torch.Tensor


class Rule(Protocol):
    """The L2 normalisation of queries and keys, and the gated delta rule. `initial_state` [B, H, E, V]: as in
    gated_delta_rule. Returns the outputs [B, T, H, V] and, with `keep_state`, the state after the last token
    of each sequence, otherwise None."""

    def __call__(
        self,
        inputs: RuleInputs,
        initial_state: torch.Tensor | None,
        documents: Documents | None,
        keep_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def torch_rule(
    inputs: RuleInputs, initial_state: torch.Tensor | None, documents: Documents | None, keep_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rule on any device, for all dtypes: in chunks, and by the recurrence for a single token."""
    q, k, v, log_decay, beta = inputs
    starts = None if documents is None else documents.starts
    rule = recurrent_gated_delta_rule if v.shape[1] == 1 else gated_delta_rule
    out, state = rule(l2_normalized(q), l2_normalized(k), v, log_decay, beta, initial_state, starts)
    return out, state if keep_state else None


def fla_rule(
    inputs: RuleInputs, initial_state: torch.Tensor | None, documents: Documents | None, keep_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rule by the kernels of flash-linear-attention. A single token goes to torch_rule."""
    B, T = inputs.v_BTHV.shape[:2]
    if T == 1:
        return torch_rule(inputs, initial_state, documents, keep_state)
    q, k, v, log_decay, beta = inputs
    tensors = [x.contiguous() for x in (q, k, v, log_decay.float(), beta.to(v.dtype))]
    if documents is None:
        out, state, *_ = _fla(tensors, initial_state, None, None, keep_state)
        return out, state if keep_state else None
    flat = [x.flatten(0, 1)[None] for x in tensors]
    cu_seqlens, bounds = documents.cu_seqlens, torch.arange(0, (B + 1) * T, T, device=q.device)
    if initial_state is not None:  # for the first document of each sequence, if it began earlier
        first = initial_state.masked_fill(documents.starts[:, 0, None, None, None], 0.0)
        states = first.new_zeros(cu_seqlens.shape[0] - 1, *first.shape[1:])
        initial_state = states.index_copy(0, torch.searchsorted(cu_seqlens, bounds[:-1]), first)
    out, states, *_ = _fla(flat, initial_state, cu_seqlens, documents.chunk_indices, keep_state)
    out = out[0].unflatten(0, (B, T))
    return out, states[torch.searchsorted(cu_seqlens, bounds[1:]) - 1] if keep_state else None


def kernel_for(device: torch.device, dtype: torch.dtype) -> Rule:
    """The implementation for activations of this dtype on this device: fla_rule for bf16 and fp16 on CUDA,
    otherwise torch_rule. Deterministic algorithms need torch_rule, too. Raises ConfigError if the package
    that fla_rule needs is missing or wrong; called before the first forward, not in it."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return torch_rule
    if torch.are_deterministic_algorithms_enabled():
        return torch_rule
    if reason := obstacle(torch.cuda.get_device_capability(device)[0]):
        raise ConfigError(f"the gated delta rule on CUDA {reason}", "model.name")
    return fla_rule


def obstacle(capability: int) -> str:
    """Why the kernels cannot run on a GPU of this major compute capability, as far as it shows without
    running them; empty if nothing shows."""
    installed = _version("fla-core")
    if installed is None:
        return "needs the package fla-core: pip install 'titanlite[linear-attention]'"
    if not FLA_VERSIONS[0] <= installed < FLA_VERSIONS[1]:
        return "needs fla-core 0.6: pip install 'titanlite[linear-attention]'"
    triton = _version("triton")
    if triton is None:
        return "needs Triton, which torch's builds for CUDA bring"
    low, high = WRONG_ON_HOPPER
    if capability == 9 and low <= triton < high and _version("tilelang") is None:
        number = version("triton")
        return f"has wrong gradients on Hopper GPUs with Triton {number}: install Triton 3.7.1 or tilelang"
    return ""


def _version(package: str) -> tuple[int, ...] | None:
    """The numbers of the version of an installed package; None if it is not installed."""
    try:
        text = version(package)
    except PackageNotFoundError:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


# Operators, because torch.compile cannot trace the package's functions. They call the package's forward and
# backward, not its autograd.Function: its saved tensors would be lost at the end of an operator, so that the
# backward would have to run the forward again.


class _Kept(NamedTuple):
    """What the backward needs of the forward: normalised queries and keys [B, T, K, E], their inverse norms
    fp32 [B, T, K], sums of the log decay within chunks, in base 2, fp32 [B, T, H], and the inverse of each
    chunk's matrix [B, T, H, CHUNK_SIZE]."""

    q: torch.Tensor
    q_rstd: torch.Tensor
    k: torch.Tensor
    k_rstd: torch.Tensor
    decay: torch.Tensor
    inverse: torch.Tensor


@torch.library.custom_op("titanlite::fla_gated_delta_rule", mutates_args=())
def _fla(
    inputs: list[torch.Tensor],
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    keep_state: bool,
) -> list[torch.Tensor]:
    """The outputs [B, T, H, V], the states [M or B, H, E, V], or an empty tensor without `keep_state`, and
    _Kept. `inputs`: contiguous q, k, v, log decay and beta."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    q, k, v, log_decay, beta = inputs
    q, q_rstd = l2norm_fwd(q)
    k, k_rstd = l2norm_fwd(k)
    decay, out, inverse, state, *_ = chunk_gated_delta_rule_fwd(
        q,
        k,
        v,
        log_decay,
        beta,
        scale=k.shape[-1] ** -0.5,
        initial_state=initial_state,
        output_final_state=keep_state,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    state = out.new_empty(0, dtype=torch.float32) if state is None else state
    kept = _Kept(q, q_rstd, k, k_rstd, decay, inverse)
    return [out.to(q.dtype).contiguous(), state.contiguous(), *kept]


@_fla.register_fake
def _(
    inputs: list[torch.Tensor],
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    keep_state: bool,
) -> list[torch.Tensor]:
    q, k, v, log_decay, _ = inputs
    num_states = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_shape = (num_states, v.shape[2], q.shape[3], v.shape[3]) if keep_state else (0,)
    q_rstd, k_rstd = (x.new_empty(x.shape[:3], dtype=torch.float32) for x in (q, k))
    inverse = k.new_empty((*v.shape[:3], CHUNK_SIZE))
    out, like_q, like_k, decay = (torch.empty_like(x) for x in (v, q, k, log_decay))
    state = v.new_empty(state_shape, dtype=torch.float32)
    return [out, state, *_Kept(like_q, q_rstd, like_k, k_rstd, decay, inverse)]


@torch.library.custom_op("titanlite::fla_gated_delta_rule_backward", mutates_args=())
def _fla_backward(
    kept: list[torch.Tensor],
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    g_out_BTHV: torch.Tensor,
    g_state: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The gradients of the five inputs, and of the initial state if there is one. `kept`: v and beta,
    and then as in _Kept."""
    from fla.modules.norm.l2norm import l2norm_bwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    v, beta, q, q_rstd, k, k_rstd, decay, inverse = kept
    g_q, g_k, g_v, g_beta, g_decay, g_initial, *_ = chunk_gated_delta_rule_bwd(
        q,
        k,
        v,
        decay,
        beta,
        inverse,
        scale=k.shape[-1] ** -0.5,
        initial_state=initial_state,
        do=g_out_BTHV,
        dht=g_state,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    gradients = [l2norm_bwd(q, q_rstd, g_q), l2norm_bwd(k, k_rstd, g_k), g_v, g_decay, g_beta]
    leaves = [q, k, v, decay, beta]
    if initial_state is not None:
        gradients, leaves = [*gradients, g_initial], [*leaves, initial_state]
    return [g.to(x.dtype).contiguous() for g, x in zip(gradients, leaves)]


@_fla_backward.register_fake
def _(
    kept: list[torch.Tensor],
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    g_out_BTHV: torch.Tensor,
    g_state: torch.Tensor | None,
) -> list[torch.Tensor]:
    v, beta, q, _, k, _, decay, _ = kept
    leaves = [q, k, v, decay, beta, *([] if initial_state is None else [initial_state])]
    return [x.new_empty(x.shape) for x in leaves]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    (_, _, v, _, beta), *others, ctx.keep_state = inputs
    kept = output[2:]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(v, beta, *kept, *others)


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    *kept, initial_state, cu_seqlens, chunk_indices = ctx.saved_tensors
    g_out, g_state = (None if g is None else g.contiguous() for g in gradients[:2])
    g_out = torch.zeros_like(kept[0]) if g_out is None else g_out
    g_state = g_state if ctx.keep_state else None
    leaf_gradients = _fla_backward(kept, initial_state, cu_seqlens, chunk_indices, g_out, g_state)
    g_initial = None if initial_state is None else leaf_gradients[5]
    return leaf_gradients[:5], g_initial, None, None, None


_fla.register_autograd(_backward, setup_context=_save)
