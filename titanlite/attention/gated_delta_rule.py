"""The gated delta rule (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", arXiv 2412.06464): linear
attention whose state is a matrix that forgets and is corrected, token by token.

With the state S [E, V] of a head, the log decay g, the rate beta, and L2-normalised q and k, each token does

    S = exp(g) S                      forget
    S = S + beta k (v - S^T k)^T      correct the value that the state has for k
    o = S^T q / sqrt(E)               read

`recurrent_gated_delta_rule` computes this. `gated_delta_rule` computes the same in chunks of tokens: within a
chunk, with products of matrices; from chunk to chunk, with the state. With G the sum of g up to a token, the
corrections u of a chunk's tokens solve a triangular system,

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j),

and then o_i = exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j) (q_i . k_j) u_j, divided by sqrt(E).

A document's first token resets the state to zero. The tokens of other documents are multiplied by zero, also
in the sums G, so that a document's results and gradients have the same bits for all finite values of the
other documents.

Shape suffixes: B batch, T tokens, K heads of queries and keys, H heads of values and states (a multiple of
K), E head dim of queries and keys, V head dim of values, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CHUNK_SIZE = 64
L2_EPS = 1e-6


def gated_delta_rule(
    q_BTKE: torch.Tensor,
    k_BTKE: torch.Tensor,
    v_BTHV: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    beta_BTH: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [B, T, H, V], in the dtype of the values, and the state [B, H, E, V] after the last token,
    in fp32. Computes in fp32, or in fp64 if the inputs are fp64.

    Head n of queries and keys serves the heads n H / K to (n + 1) H / K - 1 of the values. `log_decay_BTH`:
    at most 0. `initial_state` [B, H, E, V]: the state before the first token; None: zero. `starts` bool
    [B, T]: True at the first token of each document, which does not see the state before it. The caller
    has normalised queries and keys."""
    q, k, v, g_BHT, beta_BHT = _heads_first(q_BTKE, k_BTKE, v_BTHV, log_decay_BTH, beta_BTH)
    T = q.shape[2]
    C = min(CHUNK_SIZE, T)
    padding = -T % C  # tokens of rate zero and without decay, which leave the state as it is
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, C)) for x in (q, k, v))
    g_BHNC, beta_BHNC = (F.pad(x, (0, padding)).unflatten(2, (-1, C)) for x in (g_BHT, beta_BHT))

    visible = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    starts_BHNC = first_document = None
    if starts is not None:
        starts_BHNC = F.pad(starts, (0, padding)).unflatten(1, (-1, C))[:, None]
        document = starts_BHNC.cumsum(-1)
        visible = visible & (document[..., :, None] == document[..., None, :])
        first_document = document == 0

    total_BHNC = _running_sum(g_BHNC, starts_BHNC)
    decay_BHNCC = total_BHNC[..., :, None] - total_BHNC[..., None, :]
    decay_BHNCC = decay_BHNCC.masked_fill(~visible, -torch.inf).exp()
    read_BHNC = total_BHNC.exp()  # the share of the state before the chunk that a token sees
    if first_document is not None:
        read_BHNC = read_BHNC.masked_fill(~first_document, 0.0)

    k_beta = k * beta_BHNC[..., None]
    system = (k_beta @ k.mT) * decay_BHNCC  # only the part below the diagonal counts, the diagonal is one
    right = torch.cat((v * beta_BHNC[..., None], k_beta * read_BHNC[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.mT) * decay_BHNCC
    q = q * read_BHNC[..., None]
    k = k * decay_BHNCC[..., -1, :, None]
    kept_BHN = read_BHNC[..., -1]
    first = _initial(initial_state, v, k.shape[-1])
    out, state = chunk_recurrence(q, scores, values, keys, k, kept_BHN, first)
    out_BTHV = out.flatten(2, 3)[:, :, :T].transpose(1, 2)
    return out_BTHV.to(v_BTHV.dtype), state


def recurrent_gated_delta_rule(
    q_BTKE: torch.Tensor,
    k_BTKE: torch.Tensor,
    v_BTHV: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    beta_BTH: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gated_delta_rule token by token, for decoding and as the definition that tests compare with."""
    q, k, v, g_BHT, beta_BHT = _heads_first(q_BTKE, k_BTKE, v_BTHV, log_decay_BTH, beta_BTH)
    state = _initial(initial_state, v, k.shape[-1])
    decay, beta = g_BHT.exp()[..., None, None], beta_BHT[..., None, None]
    outs = []
    for t in range(q.shape[2]):
        token = slice(t, t + 1)
        if starts is not None:
            state = state.masked_fill(starts[:, t, None, None, None], 0.0)
        state = state * decay[:, :, t]
        correction = (v[:, :, token] - k[:, :, token] @ state) * beta[:, :, t]
        state = state + k[:, :, token].mT @ correction
        outs.append(q[:, :, token] @ state)
    return torch.cat(outs, dim=2).transpose(1, 2).to(v_BTHV.dtype), state


def state_flops_per_token(num_heads: int, key_dim: int, value_dim: int) -> int:
    """FLOPs of forward and backward for one token, without projections: 18 H E V.

    The recurrence multiplies each head's state with k, adds the outer product of k and the correction, and
    multiplies the state with q: three products of E V multiplications and additions, so 6 E V FLOPs, and
    twice as many for their gradients. Decay and other elementwise work is not counted, as in attention. The
    number does not depend on the sequence length. The chunked form computes more: for each token and head, a
    forward of 6 E V + 2 C (2 E + V) for the pairs of tokens in a chunk, and C (E + V) for the triangular
    system. These are not counted either, because they depend on the implementation, as does the repeated
    forward of activation checkpointing."""
    return 18 * num_heads * key_dim * value_dim


def l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum of x^2 + 1e-6) over the last dim, in fp32, or in fp64 for fp64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def loop_over_chunks(
    q_BHNCE: torch.Tensor,
    scores_BHNCC: torch.Tensor,
    values_BHNCV: torch.Tensor,
    keys_BHNCE: torch.Tensor,
    k_BHNCE: torch.Tensor,
    kept_BHN: torch.Tensor,
    state_BHEV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [B, H, N, C, V] and the state after the last chunk. For each chunk, the corrections are
    values - keys S, the outputs q S + scores corrections, and the next state kept S + k^T corrections."""
    states, corrections, last = _states_and_corrections(
        values_BHNCV, keys_BHNCE, k_BHNCE, kept_BHN, state_BHEV
    )
    return q_BHNCE @ states + scores_BHNCC @ corrections, last


def _states_and_corrections(
    values_BHNCV: torch.Tensor,
    keys_BHNCE: torch.Tensor,
    k_BHNCE: torch.Tensor,
    kept_BHN: torch.Tensor,
    state_BHEV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The states [B, H, N, E, V] before the chunks, the corrections [B, H, N, C, V], and the last state."""
    states, corrections, state = [], [], state_BHEV
    for n in range(k_BHNCE.shape[2]):
        states.append(state)
        corrections.append(values_BHNCV[:, :, n] - keys_BHNCE[:, :, n] @ state)
        state = state * kept_BHN[:, :, n, None, None] + k_BHNCE[:, :, n].mT @ corrections[-1]
    return torch.stack(states, 2), torch.stack(corrections, 2), state


# An operator with its own backward, for two reasons. torch.compile would unroll the loop, so that the time of
# compilation would grow with the sequence length. And autograd would keep the states before all chunks, which
# for T = 4096, E = V = 128 and 32 heads are 128 MiB for each layer and sequence; the backward computes them
# again.
chunk_recurrence = torch.library.custom_op(
    "titanlite::gated_delta_rule_chunks", loop_over_chunks, mutates_args=()
)


@torch.library.custom_op("titanlite::gated_delta_rule_chunks_backward", mutates_args=())
def _chunk_recurrence_backward(
    inputs: list[torch.Tensor], g_out_BHNCV: torch.Tensor, g_last_BHEV: torch.Tensor
) -> list[torch.Tensor]:
    """The gradients of the arguments of loop_over_chunks, which are `inputs`."""
    q_BHNCE, scores_BHNCC, values_BHNCV, keys_BHNCE, k_BHNCE, kept_BHN, state_BHEV = inputs
    states, corrections, _ = _states_and_corrections(values_BHNCV, keys_BHNCE, k_BHNCE, kept_BHN, state_BHEV)
    from_out_BHNEV = q_BHNCE.mT @ g_out_BHNCV
    g_corrections = scores_BHNCC.mT @ g_out_BHNCV
    g_next = torch.empty_like(states)  # gradients of the states after the chunks
    g_state = g_last_BHEV
    for n in reversed(range(k_BHNCE.shape[2])):
        g_next[:, :, n] = g_state
        g_corrections[:, :, n] += k_BHNCE[:, :, n] @ g_state
        g_state = g_state * kept_BHN[:, :, n, None, None] + from_out_BHNEV[:, :, n]
        g_state = g_state - keys_BHNCE[:, :, n].mT @ g_corrections[:, :, n]
    return [
        g_out_BHNCV @ states.mT,
        g_out_BHNCV @ corrections.mT,
        g_corrections,
        -(g_corrections @ states.mT),
        corrections @ g_next.mT,
        (g_next * states).sum((-2, -1)),
        g_state.contiguous(),
    ]


@chunk_recurrence.register_fake
def _(q: torch.Tensor, scores: torch.Tensor, values: torch.Tensor, *rest: torch.Tensor) -> Any:
    return values.new_empty(values.shape), values.new_empty(rest[-1].shape)


@_chunk_recurrence_backward.register_fake
def _(inputs: list[torch.Tensor], g_out: torch.Tensor, g_last: torch.Tensor) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in inputs]


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g_out: torch.Tensor, g_last: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(_chunk_recurrence_backward(list(ctx.saved_tensors), g_out, g_last))


chunk_recurrence.register_autograd(_backward, setup_context=_save)


def _heads_first(
    q_BTKE: torch.Tensor,
    k_BTKE: torch.Tensor,
    v_BTHV: torch.Tensor,
    log_decay_BTH: torch.Tensor,
    beta_BTH: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The inputs in fp32 or fp64 with the heads before the tokens, H heads of queries and keys, and scaled
    queries."""
    dtype = torch.promote_types(v_BTHV.dtype, torch.float32)
    inputs = (q_BTKE, k_BTKE, v_BTHV, log_decay_BTH, beta_BTH)
    q, k, v, g, beta = (x.to(dtype).transpose(1, 2) for x in inputs)
    q = q * q.shape[-1] ** -0.5
    if q.shape[1] != v.shape[1]:
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    return q, k, v, g, beta


def _initial(initial_state: torch.Tensor | None, v: torch.Tensor, key_dim: int) -> torch.Tensor:
    """The state before the first token, in the dtype of `v`."""
    if initial_state is None:
        return v.new_zeros(*v.shape[:2], key_dim, v.shape[-1])
    return initial_state.to(v.dtype).contiguous()


def _running_sum(x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """The sums over the last dim up to each element, from the last start on: Hillis & Steele's scan. With
    torch's cumsum, a document's sums would depend on the documents before it in their last bits, and cumsum
    is not deterministic on CUDA."""
    distance = 1
    while distance < x.shape[-1]:
        earlier = F.pad(x[..., :-distance], (distance, 0))
        if starts is not None:
            earlier = earlier.masked_fill(starts, 0.0)
            starts = starts | F.pad(starts[..., :-distance], (distance, 0))
        x = x + earlier
        distance *= 2
    return x
