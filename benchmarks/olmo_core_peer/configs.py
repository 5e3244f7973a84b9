"""Configurations of OLMo-core 3.0.0 on random tokens, for comparisons with titanlite.

The models are the release's own (TransformerConfig.llama3_1B and so on) with the shapes of titanlite's
measured rows. The rest is what the release's scripts choose (src/scripts/train/Llama3-8B.py,
src/examples/llm/train.py): every block and the head compiled, FSDP also on one GPU (fp32 parameters gathered
in bf16, gradients reduced in fp32), fused AdamW without weight decay of the embedding, gradients clipped to
1.0, four processes that load batches from a file, metrics collected every 10 steps. Left out because the
other trainers of the comparison do not have it: z-loss. Without checkpoints and evaluations (`no_checkpoints`
and `no_evals`, which the release has for benchmarks) and without activation checkpointing.

The scripts' attention is FlashAttention 2 or 3, which have to be compiled. Without them the release takes
F.scaled_dot_product_attention, with keys and values repeated for all heads of queries.

Options of the release follow the name of a configuration. Worth trying on its behalf:

    --model.lm_head.loss_implementation=fused_linear    Liger's loss, as the scripts for OLMo-hybrid
    --train_module.dp_config.wrapping_strategy=blocks   as the scripts for OLMo 3
    --train_module.dp_config.prefetch_factor=1          several GPUs, as the scripts for OLMoE2
    --train_module.dp_config=null --train_module.autocast_precision=bfloat16    one GPU, no FSDP
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from olmo_core.config import Config, DType
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.float8 import AOFloat8LinearConfig, Float8Config
from olmo_core.nn.attention import AttentionBackendName
from olmo_core.nn.layer_norm import LayerNormType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup, OptimGroupOverride
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

VOCABULARY = 128256
TORCH = AttentionBackendName.torch


@dataclass
class Work:
    """A model and the batch of one GPU."""

    model: TransformerConfig
    batch: int
    seq_len: int
    lr: float
    float8: bool = False


@dataclass
class Experiment(Config):
    """All settings of a run; `--section.key=value` overrides one."""

    model: TransformerConfig
    dataset: NumpyFSLDatasetConfig
    data_loader: NumpyDataLoaderConfig
    train_module: TransformerTrainModuleConfig
    trainer: TrainerConfig


def experiment(work: Work, *, ranks: int, steps: int, folder: Path) -> Experiment:
    """A run of so many steps on `folder / "tokens.npy"`, which has exactly the tokens of these steps."""
    vocabulary, tokens = work.model.vocab_size, work.batch * work.seq_len
    tokenizer = TokenizerConfig(
        vocab_size=vocabulary, eos_token_id=vocabulary - 1, pad_token_id=vocabulary - 1
    )
    return Experiment(
        model=work.model,
        dataset=NumpyFSLDatasetConfig(
            paths=[str(folder / "tokens.npy")],
            sequence_length=work.seq_len,
            tokenizer=tokenizer,
            work_dir=str(folder),
        ),
        data_loader=NumpyDataLoaderConfig(global_batch_size=tokens * ranks, seed=0, num_workers=4),
        train_module=TransformerTrainModuleConfig(
            rank_microbatch_size=tokens,
            max_sequence_length=work.seq_len,
            optim=AdamWConfig(
                lr=work.lr,
                weight_decay=0.1,
                betas=(0.9, 0.95),
                fused=True,
                group_overrides=[
                    OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})
                ],
            ),
            compile_model=True,
            dp_config=TransformerDataParallelConfig(
                name=DataParallelType.fsdp, param_dtype=DType.bfloat16, reduce_dtype=DType.float32
            ),
            float8_config=Float8Config(enabled=work.float8, ao=AOFloat8LinearConfig.recommended()),
            max_grad_norm=1.0,
            scheduler=CosWithWarmup(warmup_steps=10),
        ),
        trainer=TrainerConfig(
            save_folder=str(folder),
            save_overwrite=True,
            max_duration=Duration.steps(steps),
            metrics_collect_interval=10,
            cancel_check_interval=10,
            no_checkpoints=True,
            no_evals=True,
        ),
    )


def llama3_125m() -> Work:
    """titanlite's 125M with an untied head and the vocabulary of Llama 3."""
    model = TransformerConfig.llama_like(
        d_model=768,
        vocab_size=VOCABULARY,
        n_layers=16,
        n_heads=12,
        n_kv_heads=4,
        attn_backend=TORCH,
    )
    return Work(model, batch=16, seq_len=2048, lr=1.5e-3)


def llama3_1b() -> Work:
    """Llama 3.2 1B with an untied head."""
    return Work(TransformerConfig.llama3_1B(VOCABULARY, attn_backend=TORCH), batch=16, seq_len=2048, lr=3e-4)


def llama3_8b() -> Work:
    """Llama 3.1 8B."""
    return Work(TransformerConfig.llama3_8B(VOCABULARY, attn_backend=TORCH), batch=1, seq_len=8192, lr=3e-4)


def float8(config: Callable[[], Work]) -> Callable[[], Work]:
    """Return the configuration NAME_float8: all linear layers in float8 with the settings that the release
    recommends and its scripts use (tensorwise, all-gathers in float8, too), and the head in bf16. It needs
    torchao, for which the release asks in version 0.15.0."""

    def changed() -> Work:
        return replace(config(), float8=True)

    changed.__name__ = f"{config.__name__}_float8"
    return changed


def qwen3_0_6b() -> Work:
    """Qwen3 0.6B with its own vocabulary and tied embeddings."""
    return Work(TransformerConfig.qwen3_0_6B(151936, attn_backend=TORCH), batch=4, seq_len=4096, lr=8e-4)


def qwen3_30b_a3b_8layers() -> Work:
    """The first 8 layers of Qwen3 30B-A3B (128 experts of 768, 8 per token, no shared expert, dropless)
    with the vocabulary of Llama 3. Routing is the router's own, not forced to be balanced."""
    model = TransformerConfig.llama_like_moe(
        d_model=2048,
        vocab_size=VOCABULARY,
        n_layers=8,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        num_experts=128,
        top_k=8,
        expert_hidden_size=768,
        dropless=True,
        lb_loss_weight=0.001,
        z_loss_weight=None,
        rope_theta=1_000_000,
        qk_norm=True,
        use_head_qk_norm=True,
        layer_norm_eps=1e-6,
        layer_norm_name=LayerNormType.qwen_rms,
        attn_backend=TORCH,
    )
    model.block.feed_forward_moe.router.normalize_expert_weights = 1.0
    return Work(model, batch=4, seq_len=4096, lr=8e-4)


def debug() -> Work:
    """Two small layers, to try the program itself."""
    model = TransformerConfig.llama_like(
        d_model=256, vocab_size=512, n_layers=2, n_heads=4, n_kv_heads=2, attn_backend=TORCH
    )
    return Work(model, batch=2, seq_len=128, lr=1e-3)


CONFIGS: dict[str, Callable[[], Work]] = {
    config.__name__: config
    for config in (
        llama3_125m, llama3_1b, float8(llama3_1b), llama3_8b, float8(llama3_8b), qwen3_0_6b,
        qwen3_30b_a3b_8layers, debug, float8(debug),
    )
}  # fmt: skip
