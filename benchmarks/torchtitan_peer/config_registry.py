"""Configurations of torchtitan 0.3.0 on random tokens, for comparisons with titanlite.

Each is a function of its own here and has a second form, NAME_sdpa (`sdpa` says what it changes). What the
comparison does not fix is what the release's own llama3_8b and qwen3_30b_a3b choose: fused QKV, cross-entropy
in eight chunks, fused AdamW, CUDA graphs of forward and backward, and FlexAttention with a block-causal mask
from the positions. Fixed by the comparison: compiled, no activation checkpointing unless the name says so, no
checkpoint, validation or profiler. Options of the release come after the name: `--training.local_batch_size
2`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

VOCABULARY = 128256


class RandomTokens(IterableDataset):
    """Endless sequences of random tokens, each one document."""

    def __init__(self, vocabulary: int, seq_len: int, rank: int, positions: bool) -> None:
        self.vocabulary, self.seq_len = vocabulary, seq_len
        self.generator = torch.Generator().manual_seed(rank)
        self.positions = {"positions": torch.arange(seq_len)} if positions else {}

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(0, self.vocabulary, (self.seq_len + 1,), generator=self.generator)
            yield {"input": tokens[:-1], **self.positions}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class RandomTokensLoader(ParallelAwareDataloader):
    """Batches of random tokens by worker processes, as the release's loaders."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        num_workers: int = 2
        vocabulary: int = VOCABULARY
        positions: bool = True
        """With each token's position in its document, as the release's loaders. Without positions the rotary
        embedding needs no gather."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
        super().__init__(
            RandomTokens(config.vocabulary, seq_len, dp_rank, config.positions),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
        )


class NoTokenizer(BaseTokenizer):
    """In place of a tokenizer, which random tokens do not need."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str | None = None) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def trainer(spec: ModelSpec, *, lr: float, batch: int, seq_len: int) -> Trainer.Config:
    """A run of 30 steps."""
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
        ),
        hf_assets_path="",
        dump_folder="outputs/torchtitan",
        tokenizer=NoTokenizer.Config(),
        metrics=MetricsProcessor.Config(log_freq=5, disable_color_printing=True),
        model_spec=spec,
        optimizer=default_adamw(lr=lr),
        training=TrainingConfig(local_batch_size=batch, seq_len=seq_len, steps=30),
        dataloader=RandomTokensLoader.Config(vocabulary=spec.model.vocab_size),
        activation_checkpoint=None,
        compile=CompileConfig(enable=True),
    )


def sdpa(config: Trainer.Config) -> Trainer.Config:
    """Replace FlexAttention by F.scaled_dot_product_attention, cuDNN first, causal. The release has this
    module, but refuses it for language models because it takes no document mask. Sequences of one document
    need none, and the positions, from which the mask is made, are left out.

    If the configuration itself has context parallelism, the positions stay, because each rank has only a part
    of a sequence, and the backend is partial_dtensor: spmd_types refuses this attention there."""
    if config.parallelism.context_parallel_degree > 1:
        config.parallelism.spmd_backend = "partial_dtensor"
    else:
        config.dataloader.positions = False
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def float8(config: Trainer.Config, recipe: str = "rowwise") -> Trainer.Config:
    """Train the matrix products of all layers in float8, as the release's llama3_405b: the converter's
    default recipe, and the head in bf16. "rowwise_with_gw_hp", the converter's other recipe, computes the
    gradient of weights in bf16."""
    converter = Float8LinearConverter.Config(
        recipe_name=recipe, filter_fqns=["lm_head"], model_compile_enabled=True
    )
    config.model_spec.model = converter.build().convert(config.model_spec.model)
    return config


def llama3_125m() -> Trainer.Config:
    """titanlite's 125M with an untied head and the vocabulary of Llama 3: 297,689,856 parameters, 16 x
    2048."""
    dim = 768
    model = Llama3Model.Config(
        dim=dim,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=VOCABULARY, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=16,
            dim=dim,
            n_heads=12,
            n_kv_heads=4,
            hidden_dim=2048,
            rope=ComplexRoPE.Config(dim=64, max_seq_len=8192, theta=500000),
            attn_backend="flex",
        ),
    )
    spec = dataclasses.replace(llama3.model_registry("1B"), flavor="125M", model=model)
    return trainer(spec, lr=1.5e-3, batch=16, seq_len=2048)


def llama3_1b() -> Trainer.Config:
    """Llama 3.2 1B with an untied head: 1,498,482,688 parameters, 16 x 2048."""
    spec = llama3.model_registry("1B")
    spec.model.enable_weight_tying = False
    spec.model.tok_embeddings = dataclasses.replace(
        spec.model.tok_embeddings, param_init=llama3._EMBEDDING_INIT
    )
    return trainer(spec, lr=3e-4, batch=16, seq_len=2048)


def llama3_1b_float8() -> Trainer.Config:
    return float8(llama3_1b())


def llama3_1b_float8_gw_hp() -> Trainer.Config:
    return float8(llama3_1b(), "rowwise_with_gw_hp")


def llama3_8b() -> Trainer.Config:
    """Llama 3.1 8B: 8,030,261,248 parameters, 1 x 8192."""
    return trainer(llama3.model_registry("8B"), lr=3e-4, batch=1, seq_len=8192)


def llama3_8b_float8() -> Trainer.Config:
    return float8(llama3_8b())


def llama3_8b_float8_gw_hp() -> Trainer.Config:
    return float8(llama3_8b(), "rowwise_with_gw_hp")


def llama3_8b_tensor_parallel() -> Trainer.Config:
    """Tensor parallelism of degree 2 with sequence parallelism, 2 x 8192 for two GPUs. The backend is
    partial_dtensor: before torch 2.14, FSDP cannot be combined with tensor parallelism by spmd_types. Overlap
    of collectives with matrix products: `--compile.enable_async_tensor_parallel`."""
    config = llama3_8b()
    config.training.local_batch_size = 2
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def llama3_8b_context_parallel() -> Trainer.Config:
    """Context parallelism of degree 4 with activation checkpointing of all layers, 1 x 32,768 for four
    GPUs."""
    config = llama3_8b()
    config.training.seq_len = 32768
    config.parallelism.context_parallel_degree = 4
    config.activation_checkpoint = FullAC.Config()
    return config


def qwen3_0_6b() -> Trainer.Config:
    """Qwen3 0.6B with its own vocabulary and tied embeddings, 4 x 4096."""
    return trainer(qwen3.model_registry("0.6B"), lr=8e-4, batch=4, seq_len=4096)


def qwen3_30b_a3b(layers: int) -> Trainer.Config:
    """The first layers of Qwen3 30B-A3B (128 experts of 768, 8 per token) with the vocabulary of Llama 3, 4 x
    4096. The tokens' experts are those that the router chooses."""
    spec = qwen3.model_registry("30B-A3B")
    model = spec.model
    del model.layers[layers:]
    model.vocab_size = VOCABULARY
    model.tok_embeddings = dataclasses.replace(model.tok_embeddings, num_embeddings=VOCABULARY)
    model.lm_head = dataclasses.replace(model.lm_head, out_features=VOCABULARY)
    return trainer(spec, lr=8e-4, batch=4, seq_len=4096)


def qwen3_30b_a3b_8layers() -> Trainer.Config:
    """5,510,303,744 parameters."""
    return qwen3_30b_a3b(8)


def qwen3_30b_a3b_24layers() -> Trainer.Config:
    """15.5e9 parameters."""
    return qwen3_30b_a3b(24)


def with_sdpa(config: Callable[[], Trainer.Config]) -> Callable[[], Trainer.Config]:
    """The second form of a configuration."""
    return functools.wraps(config)(lambda: sdpa(config()))


CONFIGS = (
    llama3_125m, llama3_1b, llama3_1b_float8, llama3_1b_float8_gw_hp, llama3_8b, llama3_8b_float8,
    llama3_8b_float8_gw_hp, llama3_8b_tensor_parallel, llama3_8b_context_parallel, qwen3_0_6b,
    qwen3_30b_a3b_8layers, qwen3_30b_a3b_24layers,
)  # fmt: skip
for _config in CONFIGS:
    globals()[f"{_config.__name__}_sdpa"] = with_sdpa(_config)
