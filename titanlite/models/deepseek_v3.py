"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): multi-head latent attention, experts chosen by a sigmoid
router in groups, shared experts, and dense first blocks. Moonlight (Liu et al. 2025) has the same form.

Queries, keys and values are projected from latent vectors of low rank. Each head has dims that the rotary
embedding turns and dims that it does not; the rotated key is shared by all heads. Values have fewer dims than
queries and keys. Parameter names follow Hugging Face's DeepseekV3ForCausalLM in transformers 5.

Shape suffixes: B batch, T tokens, N tokens of all sequences, K experts per token, E experts, G groups of
experts, D model dim, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.attention.base import Attention
from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import MLP_PLAN, TP_PLAN, AttentionLayer, dense_mlp
from titanlite.models.hf_config import check_fixed, check_no_window, from_hf, to_hf
from titanlite.models.layers import Linear, RMSNorm, SwiGLU, apply_rope
from titanlite.models.moe import MoE, MoEConfig, MoEDecoder, MoEFamily, Router
from titanlite.models.multi_token import MultiTokenBlock, MultiTokenPrediction

LATENT_NORM_EPS = 1e-6  # of the norms of latent vectors, whatever norm_eps is
SUM_EPS = 1e-20  # in the denominator of the weights


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Config(MoEConfig):
    """The architecture of one flavor. `head_dim`: dims of queries and keys, of which the last `rope_head_dim`
    are rotated. `v_head_dim`: dims of values. `q_lora_rank`, `kv_lora_rank`: dims of the latent vectors of
    queries, and of keys and values; q_lora_rank = 0: queries are projected from the hidden states.
    `hidden_dim`: hidden units of the MLP of the first `n_dense_layers` blocks, which have no experts.

    Beside its n_experts_per_token experts, every token visits `n_shared_experts` experts, which are one MLP.
    The experts form `n_expert_groups` groups of equal size, and a token's experts are in its
    `n_expert_groups_per_token` best groups. `routed_scaling_factor` multiplies the weights of experts.

    `rope_mscale_all_dim`, only with YaRN and rope_attention_factor = 1: the attention scores are multiplied
    by the square of 0.1 rope_mscale_all_dim ln(rope_factor) + 1; 0: by 1.

    `n_mtp_layers`: modules for multi-token prediction (multi_token.py). `mtp_loss_factor`: the weight of
    their mean loss; the default is DeepSeek-V3's for its first 10 of 14.8 trillion tokens, after which it was
    0.1 (section 4.2 of the report)."""

    may_be_zero: ClassVar[tuple[str, ...]] = (
        *MoEConfig.may_be_zero, "q_lora_rank", "n_dense_layers", "rope_mscale_all_dim", "n_mtp_layers",
    )  # fmt: skip

    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    head_dim: int = 192
    rope_head_dim: int = 64
    v_head_dim: int = 128
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    n_dense_layers: int = 1
    n_shared_experts: int = 1
    n_expert_groups: int = 1
    n_expert_groups_per_token: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rope_mscale_all_dim: float = 0.0
    n_mtp_layers: int = 0
    mtp_loss_factor: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_heads != self.n_heads:
            raise ConfigError(
                f"n_kv_heads = {self.n_kv_heads} is not n_heads = {self.n_heads}: latent attention has "
                "keys and values for each head"
            )
        if self.rope_head_dim % 2 or self.rope_head_dim >= self.head_dim:
            raise ConfigError(
                f"rope_head_dim = {self.rope_head_dim} is not even or not below head_dim = {self.head_dim}"
            )
        if self.n_dense_layers >= self.n_layers:
            raise ConfigError(
                f"n_dense_layers = {self.n_dense_layers} is not below n_layers = {self.n_layers}: no block "
                "would have experts"
            )
        if self.n_mtp_layers and self.sliding_window:
            raise ConfigError("n_mtp_layers: multi-token prediction does not work with a sliding_window")
        self._check_groups()
        if self.rope_mscale_all_dim and not self.window_rope_scaled:
            raise ConfigError(
                f"rope_mscale_all_dim = {self.rope_mscale_all_dim} scales the scores of all layers: "
                "window_rope_scaled cannot be false"
            )
        if self.rope_mscale_all_dim and (self.rope_type != "yarn" or self.rope_attention_factor != 1.0):
            raise ConfigError(
                f"rope_mscale_all_dim = {self.rope_mscale_all_dim} needs rope_type = 'yarn' and "
                "rope_attention_factor = 1"
            )

    def _check_groups(self) -> None:
        groups, chosen = self.n_expert_groups, self.n_expert_groups_per_token
        if self.n_experts % groups or (groups > 1 and self.n_experts < 2 * groups):
            raise ConfigError(
                f"n_experts = {self.n_experts} cannot be divided into n_expert_groups = {groups} equal "
                "groups of two or more"
            )
        if chosen > groups:
            raise ConfigError(f"n_expert_groups_per_token = {chosen} is above n_expert_groups = {groups}")
        if self.n_experts_per_token > (most := chosen * self.n_experts // groups):
            raise ConfigError(
                f"n_experts_per_token = {self.n_experts_per_token} is above the {most} experts of "
                f"n_expert_groups_per_token = {chosen} groups"
            )

    @property
    def score_scale(self) -> float:
        """The factor of the attention scores in addition to 1 / sqrt(head_dim)."""
        mscale = 0.1 * self.rope_mscale_all_dim * math.log(self.rope_factor) + 1.0
        return self.attention_scale * mscale * mscale


# The fields of config.json in moonshotai/Moonlight-16B-A3B and deepseek-ai/DeepSeek-V3-Base on
# huggingface.co; not compared with the published files. Tests compare the numbers of parameters.
FLAVORS = {
    "debug": DeepSeekV3Config(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=48, rope_head_dim=16, v_head_dim=32,
        q_lora_rank=64, kv_lora_rank=32, hidden_dim=384, vocab_size=8192, max_position=2048,
        tie_word_embeddings=True, n_experts=8, n_experts_per_token=2, moe_hidden_dim=128, n_expert_groups=4,
        n_expert_groups_per_token=2, routed_scaling_factor=2.5,
    ),
    "16B": DeepSeekV3Config(
        dim=2048, n_layers=27, n_heads=16, n_kv_heads=16, hidden_dim=11264, vocab_size=163840,
        max_position=8192, norm_eps=1e-5, rope_theta=50000.0, n_experts=64, n_experts_per_token=6,
        moe_hidden_dim=1408, n_shared_experts=2, routed_scaling_factor=2.446,
    ),
    "671B": DeepSeekV3Config(
        dim=7168, n_layers=61, n_heads=128, n_kv_heads=128, hidden_dim=18432, vocab_size=129280,
        max_position=163840, q_lora_rank=1536, n_dense_layers=3, n_experts=256, n_experts_per_token=8,
        moe_hidden_dim=2048, n_expert_groups=8, n_expert_groups_per_token=4, routed_scaling_factor=2.5,
        rope_type="yarn", rope_factor=40.0, rope_original_max_position=4096, rope_attention_factor=1.0,
        rope_mscale_all_dim=1.0,
    ),
}  # fmt: skip


class LatentAttention(AttentionLayer):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1). Keys and values are
    computed for every head, also in generation: the cache holds them, not the latent vectors."""

    def __init__(self, config: DeepSeekV3Config):
        super().__init__(config)
        dim, heads, rank = config.dim, config.n_heads, config.q_lora_rank
        self.rope_dim, self.v_dim, self.kv_rank = config.rope_head_dim, config.v_head_dim, config.kv_lora_rank
        self.plain_dim = config.head_dim - config.rope_head_dim
        self.scale = config.score_scale
        self.q_proj = None if rank else Linear(dim, heads * config.head_dim)
        self.q_a_proj = Linear(dim, rank) if rank else None
        self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS) if rank else None
        self.q_b_proj = Linear(rank, heads * config.head_dim) if rank else None
        self.kv_a_proj_with_mqa = Linear(dim, self.kv_rank + self.rope_dim)
        self.kv_a_layernorm = RMSNorm(self.kv_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(self.kv_rank, heads * (self.plain_dim + self.v_dim))
        self.shared_key = nn.Identity()  # takes the key of all heads; tensor parallel gathers its tokens
        self.o_proj = Linear(heads * self.v_dim, dim)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        k_BTHE, v_BTHE = self.keys_and_values(x_BTD, cos, sin)
        out_BTHE = attention.attend(self.queries(x_BTD, cos, sin), k_BTHE, v_BTHE)
        return self.o_proj(out_BTHE.flatten(-2))

    def queries(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.q_proj is not None:
            q = self.q_proj(x_BTD)
        else:
            assert self.q_a_proj is not None
            assert self.q_a_layernorm is not None
            assert self.q_b_proj is not None
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        plain, rotated = q.unflatten(-1, (-1, self.plain_dim + self.rope_dim)).split(
            (self.plain_dim, self.rope_dim), -1
        )
        if self.scale != 1.0:  # in fp32, and equal for every attention backend
            plain = (plain.float() * self.scale).to(plain.dtype)
            cos, sin = cos * self.scale, sin * self.scale
        return torch.cat((plain, apply_rope(halves(rotated), cos, sin)), -1)

    def keys_and_values(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rotated = self.kv_a_proj_with_mqa(x_BTD).split((self.kv_rank, self.rope_dim), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        plain, values = expanded.unflatten(-1, (-1, self.plain_dim + self.v_dim)).split(
            (self.plain_dim, self.v_dim), -1
        )
        rotated = self.shared_key(rotated).unsqueeze(-2)  # one key for all heads
        rotated = apply_rope(halves(rotated), cos, sin)
        return torch.cat((plain, rotated.expand(-1, -1, plain.shape[-2], -1)), -1), values


def halves(x: torch.Tensor) -> torch.Tensor:
    """Queries or keys whose rotary pairs are the elements 2e and 2e + 1, as apply_rope takes them: e and e +
    E/2. Both are reordered alike, so that their products do not change."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class GroupRouter(Router):
    """Chooses experts by the sigmoid of their logits plus a correction bias, among the best groups of
    experts. A group counts as the sum of its two best experts. The bias is for balancing the load: it decides
    the choice, and never enters the weights."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: DeepSeekV3Config):
        super().__init__(config)
        self.num_groups, self.num_chosen_groups = config.n_expert_groups, config.n_expert_groups_per_token
        self.factor = config.routed_scaling_factor
        self.register_buffer("e_score_correction_bias", torch.empty(config.n_experts, dtype=torch.float32))

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        return logits_NE.sigmoid()

    def probabilities(self, scores_NE: torch.Tensor) -> torch.Tensor:
        return scores_NE / (scores_NE.sum(-1, keepdim=True) + SUM_EPS)

    def choose(self, scores_NE: torch.Tensor) -> torch.Tensor:
        scores_NE = scores_NE + self.e_score_correction_bias
        if self.num_chosen_groups < self.num_groups:
            scores_NGE = scores_NE.unflatten(-1, (self.num_groups, -1))
            best_NG = scores_NGE.topk(2, dim=-1).values.sum(-1).topk(self.num_chosen_groups, dim=-1).indices
            others_NG = torch.ones_like(scores_NGE[..., 0], dtype=torch.bool).scatter(-1, best_NG, False)
            scores_NE = scores_NGE.masked_fill(others_NG[..., None], -math.inf).flatten(-2)
        return super().choose(scores_NE)

    def weigh(self, scores_NK: torch.Tensor) -> torch.Tensor:
        if self.norm_topk_prob:
            scores_NK = scores_NK / (scores_NK.sum(-1, keepdim=True) + SUM_EPS)
        return scores_NK * self.factor


class SharedMoE(MoE):
    """A layer of experts with shared experts, which every token visits."""

    def __init__(self, config: DeepSeekV3Config):
        super().__init__(config)
        self.gate = GroupRouter(config)
        self.shared_experts = SwiGLU(config.dim, config.n_shared_experts * config.moe_hidden_dim)

    def forward(self, h_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(h_BTD) + self.shared_experts(h_BTD)


def mlp_of(config: DeepSeekV3Config, block: int) -> nn.Module:
    """The MLP, dense or with experts, of the block with the number `block`."""
    return dense_mlp(config, block) if block < config.n_dense_layers else SharedMoE(config)


def tp_plan(config: DeepSeekV3Config) -> dict[str, str]:
    """Decoder.tp_plan. Latent vectors are computed by each rank for its tokens, and gathered: they have fewer
    features than the hidden states."""
    attention = {
        "kv_a_proj_with_mqa": "tokens",
        "kv_a_layernorm": "sequence",
        "kv_b_proj": "gather_colwise",
        "shared_key": "gather_output",
        "o_proj": "rowwise",
    }
    if config.q_lora_rank:
        attention |= {"q_a_proj": "tokens", "q_a_layernorm": "sequence", "q_b_proj": "gather_colwise"}
    else:
        attention["q_proj"] = "gather_colwise"
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in attention.items()}
    others = [name for name in TP_PLAN if ".self_attn" not in name and ".mlp" not in name]
    plan |= {name: TP_PLAN[name] for name in others}
    for block in range(config.n_layers + config.n_mtp_layers):
        mlp = f"model.layers.{block}.mlp"
        dense = mlp
        if block >= config.n_dense_layers:
            plan |= {mlp: "local", f"{mlp}.gate": "router"}
            dense = f"{mlp}.shared_experts"
        plan |= {name.replace("model.layers.*.mlp", dense): style for name, style in MLP_PLAN.items()}
    return plan if config.tie_word_embeddings else plan | {"lm_head": "head"}


class DeepSeekV3Decoder(MoEDecoder):
    """MoEDecoder with latent attention."""

    config: DeepSeekV3Config

    def __init__(self, config: DeepSeekV3Config):
        super().__init__(config, LatentAttention, mlp=mlp_of)
        self.folded_scales["self_attn.q_b_proj.weight"] = config.attention_scale
        self.tp_plan = tp_plan(config)

    def num_heads(self, name: str) -> int:
        heads = name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight"))
        return self.config.n_heads if heads else 1


class DeepSeekV3WithMTP(MultiTokenPrediction, DeepSeekV3Decoder):
    """DeepSeekV3Decoder with modules for multi-token prediction."""

    def __init__(self, config: DeepSeekV3Config):
        super().__init__(config)
        numbers = range(config.n_layers, config.n_layers + config.n_mtp_layers)
        blocks = [MultiTokenBlock(config, LatentAttention(config), mlp_of(config, i)) for i in numbers]
        self.add_modules(blocks, config.mtp_loss_factor)


HF_FIELDS = {  # Hugging Face's name: field of DeepSeekV3Config
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
    "kv_lora_rank": "kv_lora_rank",
    "first_k_dense_replace": "n_dense_layers",
    "n_routed_experts": "n_experts",
    "num_experts_per_tok": "n_experts_per_token",
    "moe_intermediate_size": "moe_hidden_dim",
    "n_shared_experts": "n_shared_experts",
    "n_group": "n_expert_groups",
    "topk_group": "n_expert_groups_per_token",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
}
HF_FIXED = {  # the only supported values, and the values of missing keys
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
}


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3(MoEFamily, name="deepseek_v3"):
    """DeepSeek-V3. 16B is Moonlight-16B-A3B. `overrides = { n_mtp_layers = 1 }`: multi-token prediction."""

    tp_fields: ClassVar[dict[str, str]] = ModelFamily.tp_fields
    flavors = FLAVORS
    hf_model_type = "deepseek_v3"

    def check_tensor_parallel(self, degree: int) -> None:
        super().check_tensor_parallel(degree)
        if (size := self.config.n_shared_experts * self.config.moe_hidden_dim) % degree:
            raise ConfigError(
                f"n_shared_experts x moe_hidden_dim = {size}, the hidden units of the shared experts, is not "
                f"divisible by {degree}",
                "parallelism.tensor_parallel_degree",
            )

    def build(self) -> Decoder:
        return DeepSeekV3WithMTP(self.config) if self.config.n_mtp_layers else DeepSeekV3Decoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        config = self.config
        check_no_window(config)
        fields = to_hf(config)
        del fields["head_dim"]  # transformers would read it as qk_rope_head_dim
        if config.rope_mscale_all_dim:
            mscale = dict.fromkeys(("mscale", "mscale_all_dim"), config.rope_mscale_all_dim)
            fields |= {key: fields[key] | mscale for key in ("rope_parameters", "rope_scaling")}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            **fields,
            "q_lora_rank": config.q_lora_rank or None,
            "qk_nope_head_dim": config.head_dim - config.rope_head_dim,
            **{key: getattr(config, name) for key, name in HF_FIELDS.items()},
            **HF_FIXED,
            "num_nextn_predict_layers": config.n_mtp_layers,
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        check_fixed(config, HF_FIXED)
        if missing := [key for key in (*HF_FIELDS, "qk_nope_head_dim") if config.get(key) is None]:
            raise ConfigError(f"config.json has no {missing[0]}")
        if "q_lora_rank" not in config:  # null: no rank
            raise ConfigError("config.json has no q_lora_rank")
        head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        fields = from_hf(config | {"head_dim": head_dim}, rms_norm_eps=1e-6, tie_word_embeddings=False)
        return cls.of_shape(
            {
                **fields,
                **{name: config[key] for key, name in HF_FIELDS.items()},
                "q_lora_rank": config["q_lora_rank"] or 0,
                "n_mtp_layers": config.get("num_nextn_predict_layers") or 0,
                "rope_mscale_all_dim": _mscale(config, fields),
            }
        )


def _mscale(config: dict[str, Any], fields: dict[str, Any]) -> float:
    """rope_mscale_all_dim of a config.json whose other fields are `fields`."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    mscale = rope.get("mscale_all_dim") or 0.0
    if not mscale or fields["rope_factor"] == 1.0:
        return 0.0
    if fields.get("rope_attention_factor", 0.0) != 1.0:
        raise ConfigError(
            f"config.json: mscale_all_dim = {mscale}; only an equal mscale is supported, with YaRN"
        )
    return mscale
