"""The tensors that the backward of a transformer block needs, by mode of activation checkpointing, with and
without torch.compile.

A block of RotaryDecoder, for one token; d model dim, q query features, kv key or value features, h hidden
features of the MLP:

    x         d    input of the block             gate, up    h   outputs of the MLP's first layers
    n1, n2    d    outputs of the two norms       product     h   input of the MLP's last layer
    q, k, v        as attention takes them        x2          d   sum of x and the attention's output
    raw            q + kv, before head norms      out         q   output of attention
    lse            log-sum-exps in fp32, one per query head

A block with norms after attention and MLP, too, also needs their inputs: attended, added, d each. A block
with norms only there has these in place of n1 and n2: attention and MLP read x and x2.

Of a layer of K experts per token, h is the hidden features of K experts. It computes the inputs of the
experts and the product again in the backward, and keeps besides:

    routed    d    input of the router in fp32
    routing        scores of all experts in fp32; numbers, places and weights of the token's experts
    received       with expert parallel: the rows that came from other ranks, K d by an all-to-all, or those
                   of all S ranks, S d

A shared expert is a further MLP, of which the product and the output are kept.

With a gate after attention (Qwen3.5): gate_q, gated   q   the gate, and the input of the last layer.

An MLP without a gate has no `gate` (gpt); a value embedding (gpt) is kept for the gradient of its gate:

    embedded  kv   value embedding of the token

With a gated delta net in place of attention, of k key features and v features and H heads of values:

    mixed  2k + v  input of the convolution       q, k    k   normalised queries and keys
    z          v   gate of the output             v       v   values
    out        v   output of the rule             gated   v   input of the last layer
    rule           the inverse of a matrix of each chunk: 64 H; decays and norms: 16 bytes each

Its kernels are those of flash-linear-attention; the reference in torch, of deterministic runs, keeps more.

Compiled, all of them are kept in the compute dtype. Which ones the compiler keeps was found from runs of
llama3_1b on one H200 (activation_checkpointing_h200.json, llama3_1b_float8_h200_b16_torchtitan.json in
benchmarks/results); benchmarks/plan_errors.py compares with all recorded runs. Without the compiler the list
follows from torch's autograd formulas, and a test counts it. With experts or linear attention, the test
counts both. Tokens are taken to choose all experts equally often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from titanlite.attention.gated_delta_rule import CHUNK_SIZE
from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder
from titanlite.models.gated_delta_net import GatedDeltaNet
from titanlite.models.moe import MoEConfig
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint

NORMS, ATTENTION, MLP = "norms", "attention", "mlp"
MODULE_OF = {
    "n1": NORMS, "n2": NORMS, "norm1": NORMS, "norm2": NORMS,
    "raw": ATTENTION, "q": ATTENTION, "k": ATTENTION, "v": ATTENTION, "out": ATTENTION, "lse": ATTENTION,
    "gate_q": ATTENTION, "gated": ATTENTION, "mixed": ATTENTION, "z": ATTENTION, "rule": ATTENTION,
    "embedded": ATTENTION,
    "gate": MLP, "silu": MLP, "up": MLP, "product": MLP,
    "routed": MLP, "routing": MLP, "received": MLP,
    "shared": MLP, "shared_gate": MLP, "shared_out": MLP,
}  # fmt: skip
# Kept by the mode "op": the results of attention or of the rule, and of every second product. Attention's
# first and third product are q, with its gate, and v; those of a gated delta net z and beta, and the fifth is
# the last layer's, whose sum with x is x2.
OP = {"x", "q", "gate_q", "v", "out", "lse"}
OP_OF_LINEAR = {"x", "x2", "z", "q", "k", "rule", "out"}
# Then, of an MLP behind attention: gate, and the last product, which only a norm after it needs; behind a
# gated delta net: up. Of experts: the router's results, and the first of their two products. Of a shared
# expert, whose own gate is the product before: up, or gate and the last product. By whether the block has a
# gated delta net:
OP_OF_MLP = {False: {"gate", "added"}, True: {"up"}}
OP_OF_EXPERTS = {
    False: {"gate", "up", "routing", "shared_gate"},
    True: {"gate", "up", "routing", "shared_gate", "shared_out"},
}


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The sizes of a block, and how it is computed. `size`: bytes of the compute dtype. `is_float8`: its
    linear layers compute in 8 bits. `num_norms`: 2 or 4, beside the norms of heads. `norms_inputs`: whether
    there are norms before attention and MLP. `tp`, `cp`, `ep`: degrees. `gathers_tokens`: whether expert
    parallel gathers all tokens. `num_experts`, `num_chosen`: the experts of the block and of a token; 0 and 1
    for an MLP. `shared`: hidden features of a shared expert. `gates_attention`: whether the output of
    attention is multiplied by a gate. `is_linear`: the block has a gated delta net, whose keys have `q`
    features and whose values `kv` features in `heads` heads."""

    d: int
    q: int
    kv: int
    h: int
    heads: int
    normalizes_heads: bool
    size: int
    compiled: bool
    is_float8: bool
    num_norms: int = 2
    norms_inputs: bool = True
    tp: int = 1
    cp: int = 1
    ep: int = 1
    gathers_tokens: bool = False
    num_experts: int = 0
    num_chosen: int = 1
    shared: int = 0
    gates_attention: bool = False
    is_linear: bool = False
    gates_mlp: bool = True
    has_value_embedding: bool = False

    @classmethod
    def of_blocks(cls, net: Decoder, **how: int | bool) -> list[BlockShape]:
        """The shapes of the blocks of a model, in order. Raises ConfigError for models that cannot be
        planned."""
        config, num_layers = net.config, len(net.moe_layers())
        is_latent = config.v_head_dim != config.head_dim
        if num_layers not in (0, len(net.blocks())) or is_latent or net.training_blocks():
            raise ConfigError(
                "models with experts in some blocks only, latent attention or multi-token prediction cannot "
                "be planned yet",
                "model.name",
            )
        return [cls._of_block(block, config, how) for block in net.blocks().values()]

    @classmethod
    def _of_block(cls, block: nn.Module, config: Any, how: dict[str, Any]) -> BlockShape:
        hidden, experts = config.hidden_dim, dict[str, Any]()
        if isinstance(config, MoEConfig):
            hidden = config.n_experts_per_token * config.moe_hidden_dim
            experts = {
                "num_experts": config.n_experts,
                "num_chosen": config.n_experts_per_token,
                "shared": getattr(config, "shared_hidden_dim", 0),
            }
        names, modules = dict(block.named_parameters()), [name for name, _ in block.named_modules()]
        norms = [name for name in modules if "norm" in name and "attn" not in name]
        heads, q, kv = config.n_heads, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        delta_net = next((m for m in block.modules() if isinstance(m, GatedDeltaNet)), None)
        if delta_net is not None:
            q, _, kv = delta_net.stacked
            heads = kv // delta_net.value_head_dim
        return cls(
            d=config.dim,
            q=q,
            kv=kv,
            h=hidden,
            heads=heads,
            normalizes_heads=getattr(config, "norms_heads", False)
            or any("attn" in name and "norm" in name for name in modules),
            num_norms=len(norms),
            norms_inputs="post_feedforward_layernorm" not in norms or "input_layernorm" in norms,
            gates_attention=delta_net is None and len(names.get("self_attn.q_proj.weight", ())) > q,
            is_linear=delta_net is not None,
            gates_mlp="mlp.up_proj" not in modules or "mlp.gate_proj" in modules,
            has_value_embedding="self_attn.value_embedding" in modules,
            **experts,
            **how,
        )

    def tensors(self) -> dict[str, float]:
        """Bytes per token of each tensor that is kept without activation checkpointing. The tokens are those
        that context parallel leaves a rank."""
        tp, size = self.tp, self.size
        kept = {
            "x": self.d * size / tp,  # sequence parallel: between the layers each rank has some of the tokens
            "n1": self.d * size,
            **(self._delta_net() if self.is_linear else self._attention()),
            "x2": self.d * size / tp,
            "n2": self.d * size,
            "gate": self.h * size / tp,
            "up": self.h * size / tp,
            "product": self.h * size / tp,
        }
        if self.has_value_embedding:
            kept["embedded"] = self.kv * size / tp
        if self.num_norms > 2:
            kept |= {"attended": self.d * size / tp, "added": self.d * size / tp}
        if self.num_experts:
            routing = (4 * self.num_experts + 32 * self.num_chosen) / tp
            kept |= {"routed": 4 * self.d / tp, "routing": routing, "product": 0.0}
            # Each rank routes its own tokens. Compiled, n2 is rounded from `routed` again, unless a shared
            # expert reads it.
            kept["n2"] = 0.0 if self.compiled and not self.shared else self.d * size / tp
            if self.ep > 1:
                kept["received"] = self.num_rows * self.d * size / tp
            if self.shared:
                kept["shared_gate"], kept["shared_out"] = self.shared * size / tp, self.d * size / tp
                kept["shared"] = (2 if self.compiled else 3) * self.shared * size / tp
        if not self.compiled:
            del kept["x2"]  # sums keep nothing
            kept["x"] = 0.0
            # rms_norm keeps its fp32 input; silu and the product keep their inputs
            kept |= {"norm1": 4 * self.d / tp, "norm2": 4 * self.d / tp, "silu": self.h * size / tp}
            if self.num_norms > 2:
                kept |= {"attended": 4 * self.d / tp, "added": 4 * self.d / tp}
            if self.num_experts:
                kept["silu"] = 0.0
        elif self.is_float8:
            # Casts to 8 bits are repeated in the backward, and with them what is cheap to compute.
            kept |= {"product": 0.0, "n1": 0.0, "n2": 0.0}
            # llama3_8b_6layers_h200x2_tensor_float8.txt: what collectives and casts return is kept
            if tp > 1:
                kept |= {"n1": self.d, "n2": self.d, "product": self.h * size / tp, "out8": self.q / tp}
        if not self.norms_inputs:
            inputs = {"x": kept.pop("n1"), "x2": kept.pop("n2")}
            kept |= {name: max(read, kept.get(name, 0.0)) for name, read in inputs.items()}
            output = self.d * size / tp
            kept |= {"attended": kept.pop("norm1", output), "added": kept.pop("norm2", output)}
        if not self.gates_mlp:  # relu(up)^2 keeps relu(up), and its result is the product
            kept |= {"gate": 0.0, "silu": 0.0}
        return kept

    def _attention(self) -> dict[str, float]:
        tp, size = self.tp, self.size
        raw = (self.q + self.kv) if self.normalizes_heads else 0
        # Context parallel keeps the gathered keys and values of whole sequences.
        kv = self.kv * self.cp
        gate = self.q * size / tp if self.gates_attention else 0.0
        return {
            "raw": raw * (size if self.compiled else 4) / tp,
            "q": self.q * size / tp,
            "k": kv * size / tp,
            "v": kv * size / tp,
            "out": self.q * size / tp,
            "lse": 4 * self.heads / tp,
            "gate_q": gate,
            "gated": gate,
        }

    def _delta_net(self) -> dict[str, float]:
        tp, size = self.tp, self.size
        channels, rule = 2 * self.q + self.kv, (CHUNK_SIZE * size + 16) * self.heads
        kept = {
            "mixed": channels * size,
            "q": self.q * size,
            "k": self.q * size,
            "v": self.kv * size,
            "rule": rule,
            "z": self.kv * size,
            "out": self.kv * size,
            "gated": self.kv * size,
        }
        # The states before the chunks come from another pass of the rule, whose values are wider.
        if self.cp > 1:
            kept["rule"] += rule + 2 * (self.q + self.kv) * size
        # In fp32: the taps and the sum of the convolution; norm, gate and silu of the output.
        if not self.compiled:
            kept |= {"mixed": 5 * 4 * channels, "z": 2 * 4 * self.kv, "out": 2 * 4 * self.kv}
        return {name: num_bytes / tp for name, num_bytes in kept.items()}

    @property
    def num_rows(self) -> int:
        """The inputs of experts on a rank, per token of the rank: a copy for each expert of the token, or the
        tokens of all ranks along `expert`."""
        return self.ep if self.gathers_tokens else self.num_chosen

    def gradients(self, repeats: bool) -> float:
        """Bytes per token of the gradients that are there at once in the backward of a block.

        If the backward `repeats` the forward of the MLP: of product, gate, up and the residual stream (modes
        full, mlp and 2 of activation_checkpointing_h200.json need 1.65 GiB, which counts as 1.63). Otherwise
        compiled code writes most of them over tensors that it needs no more (optimizer_curves_h200.json, and
        with the mode attention blind_points_h200.json)."""
        num = 3 if repeats or not self.compiled else 1
        if self.num_experts:  # at least of gate and up, which are in one tensor
            num = max(num, 2)
        rows = self.num_chosen * self.d if self.num_experts else 0
        if self.gathers_tokens:  # of all ranks; uncompiled, a row for each pair of token and expert
            rows = self.ep * self.d * (1 if self.compiled else self.num_chosen) + rows
        return (num * self.h + self.d + rows) * self.size / self.tp


@dataclass(frozen=True)
class Kept:
    """Bytes per token of a block: `kept` from its forward to its backward, `repeated` in its backward only.
    `casts`: share of the block's bf16 copies of weights that a single process keeps for the backward.
    `repeats_mlp`: whether the backward repeats the forward of the MLP."""

    kept: float
    repeated: float
    casts: float = 1.0
    repeats_mlp: bool = False


def kept_by_block(shapes: Sequence[BlockShape], config: ActivationCheckpoint) -> list[Kept]:
    """Bytes that each block keeps, in the order of the blocks."""
    by_shape = {shape: _kept(shape, config) for shape in set(shapes)}
    option = config.selective_ac_option
    if config.mode == "selective" and option.isdecimal():
        every = ActivationCheckpoint(mode="none")
        return [
            by_shape[shape] if (i + 1) % int(option) == 0 else _kept(shape, every)
            for i, shape in enumerate(shapes)
        ]
    return [by_shape[shape] for shape in shapes]


def _kept(shape: BlockShape, config: ActivationCheckpoint) -> Kept:
    """Bytes that a block with activation checkpointing keeps."""
    tensors = shape.tensors()
    total = sum(tensors.values())
    if config.mode == "none":
        return Kept(total, 0.0)
    input_bytes = shape.d * shape.size / shape.tp
    # Results of collectives are not repeated. The states that linear attention gathers are small.
    gathered = tensors["k"] + tensors["v"] if shape.cp > 1 and not shape.is_linear else 0.0
    full = Kept(input_bytes + gathered, total - tensors["x"] - gathered, 0.0, repeats_mlp=True)
    option = config.selective_ac_option
    if config.mode == "full" or (config.mode == "selective" and option.isdecimal()):
        return full
    if config.mode == "memory_budget":  # interpolated between the two: the compiler chooses
        kept = max(config.memory_budget * total, full.kept)
        return Kept(kept, total - kept, config.memory_budget, repeats_mlp=kept < total)
    return _selective(shape, tensors, option, gathered)


def _selective(shape: BlockShape, tensors: Mapping[str, float], option: str, gathered: float) -> Kept:
    total = sum(tensors.values())
    if option == "op":
        names = OP_OF_LINEAR if shape.is_linear else OP
        names = names | (OP_OF_EXPERTS if shape.num_experts else OP_OF_MLP)[shape.is_linear]
        if not shape.gates_mlp:  # the gate of a value embedding is one more product before attention's last
            names = OP | ({"x2"} if shape.has_value_embedding else {"up"})
        kept = sum(size for name, size in tensors.items() if name in names) + shape.d * shape.size / shape.tp
        kept -= tensors["x"]
        others = gathered - tensors["v"] if gathered else 0.0
        return Kept(kept + others, max(total - kept, 0.0), 0.0, repeats_mlp=True)
    modules = set(option.split("+"))
    dropped = {name for name in tensors if MODULE_OF.get(name) in modules}
    if shape.compiled and ATTENTION in modules and shape.norms_inputs:
        dropped.add("n1")  # measured: 51.26 GiB, and 53.26 if it were kept
    if not shape.compiled and NORMS in modules:
        dropped -= {"n1", "n2"}  # inputs of the next layers
        dropped |= set() if shape.norms_inputs else {"attended", "added"}  # in fp32
    if NORMS in modules:
        # The output of a repeated module that the next one reads is kept: with norms+mlp n2
        # (blind_points_h200.json). norms+attention was not measured.
        dropped -= ({"n1"} if ATTENTION in modules else set()) | ({"n2"} if MLP in modules else set())
    size = sum(tensors[name] for name in dropped)
    # Without the compiler, a repeated module keeps its input if nothing else does.
    inputs = 2 * shape.d * shape.size / shape.tp if not shape.compiled and NORMS in modules else 0.0
    hidden = shape.h * max(shape.num_experts, 1) // shape.num_chosen
    num_matrices = (2, 3) if shape.is_linear else (2 + shape.gates_attention, 2)  # of q and of kv features
    attention = num_matrices[0] * shape.q + num_matrices[1] * shape.kv
    matrices = {
        ATTENTION: shape.d * attention,
        MLP: (2 + shape.gates_mlp) * shape.d * (hidden + shape.shared),
    }
    casts = 1 - sum(matrices.get(m, 0) for m in modules) / sum(matrices.values())
    return Kept(total - size + inputs, size, casts, repeats_mlp=MLP in modules)
