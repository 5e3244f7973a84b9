"""What became of torchtitan's keys, release by release: tables for `titanlite migrate`, and no program.

A key is carried over (the same name and meaning), renamed, replaced (a function makes our keys of its value)
or without counterpart, with the reason. Facts are of torchtitan 0.1 (to mid-2025, and what came before it)
and 0.2 (to 0.2.2, the last that read TOML).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Made = dict[str, Any]  # our keys and their values


@dataclass(frozen=True)
class Keys:
    """Of one release. `carried`: names; `renamed`: theirs to ours; `replaced`: theirs to what makes our keys,
    and a note; `gone`: theirs, or a pattern, to why there is none."""

    carried: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, tuple[Callable[[Any], Made], str]] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)


def words(text: str) -> frozenset[str]:
    """What stands between blanks."""
    return frozenset(text.split())


# ---- values


def chosen(key: str, values: Mapping[Any, Any]) -> Callable[[Any], Made]:
    """Our `key`, with other values for some of theirs; nothing for a value that is mapped to None."""

    def make(value: Any) -> Made:
        ours = values.get(value, value)
        return {} if ours is None else {key: ours}

    return make


def listed(value: Any) -> list[str]:
    """A list, or words joined by commas, which both were allowed."""
    words = value.split(",") if isinstance(value, str) else value
    return [str(word).strip() for word in words if str(word).strip()]


def tokenizer(value: Any) -> Made:
    """A tiktoken file with Llama 3's special tokens, or a directory with a tokenizer.json."""
    if str(value).endswith(".model"):
        return {"tokenizer": {"name": "tiktoken", "path": value, "num_special_tokens": 256}}
    return {"tokenizer": {"name": "huggingface", "path": value}}


def text_source(key: str) -> Callable[[Any], Made]:
    """A source of text for a data set's name; a data set's path comes after it and overrides it."""
    return lambda value: {key: [{"name": "text", "path": [DATASETS.get(value, f"data/{value}")]}]}


def text_path(key: str) -> Callable[[Any], Made]:
    return lambda value: {key: [{"name": "text", "path": [value]}]}


def float8_converter(value: Any) -> Made:
    return {"float8.enable": any("float8" in word and "grouped" not in word for word in listed(value))}


def layers(value: Any) -> Made:
    """Parts of the names of torchtitan's layers; migrate_rules makes titanlite's of them."""
    return {"float8.filter_fqns": listed(value)}


DATASETS = {"c4_test": "tests/assets/c4_test", "c4": "data/c4", "c4_validation": "data/c4_validation"}
_TINY_LLAMA = {
    "dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "head_dim": 16, "hidden_dim": 768,
    "vocab_size": 2048, "tie_word_embeddings": False, "rope_factor": 8.0,
}  # fmt: skip
_TINY_QWEN = {
    "dim": 256, "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 3072,
    "vocab_size": 2048,
}  # fmt: skip
FLAVORS: dict[str, dict[str, tuple[str, Made]]] = {  # theirs: ours, and what differs in it
    "llama3": {"debugmodel": ("debug", _TINY_LLAMA), **{size: (size, {}) for size in ("8B", "70B", "405B")}},
    "qwen3": {
        "debugmodel": ("debug", _TINY_QWEN),
        **{size: (size, {}) for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    },
}
MASKING = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")  # endings of flavors that mask documents

# The tokenizer of a file that names none, by release, and torchtitan's own for tests.
DEFAULT_TOKENIZER = {
    "0.1": "./torchtitan/datasets/tokenizer/tokenizer.model",
    "0.2": "./tests/assets/tokenizer",
}
TEST_TOKENIZER, TEST_TIKTOKEN = "tests/assets/tokenizer", "test_tiktoken.model"

# torchtitan's values where a file has none, by our keys; the same in 0.1.0 and 0.2.0 to 0.2.2.
DEFAULTS: Made = {
    "profiling.enable_profiling": False, "profiling.profile_freq": 10, "profiling.profiler_active": 1,
    "profiling.profiler_warmup": 3, "profiling.enable_memory_snapshot": False, "metrics.log_freq": 10,
    "metrics.enable_tensorboard": False, "optimizer.name": "adamw", "optimizer.lr": 8e-4,
    "optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200, "lr_scheduler.total_steps": 0, "lr_scheduler.decay_ratio": -1.0,
    "lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.0, "training.local_batch_size": 8,
    "training.global_batch_size": -1, "training.seq_len": 2048, "training.max_norm": 1.0,
    "training.steps": 10000, "training.enable_cpu_offload": False,
    "training.mixed_precision_param": "bfloat16", "training.mixed_precision_reduce": "float32",
    "training.gc_freq": 50, "training.deterministic": False, "data.num_workers": 0,
    "parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default", "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1, "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B", "parallelism.context_parallel_degree": 1,
    "checkpoint.enable": False, "checkpoint.folder": "checkpoint", "checkpoint.interval": 500,
    "checkpoint.export_hf": False, "checkpoint.export_dtype": "float32", "checkpoint.async_mode": "disabled",
    "checkpoint.keep_latest_k": 10, "checkpoint.load_step": -1, "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2", "activation_checkpoint.memory_budget": 0.5,
    "compile.enable": False, "float8.recipe": "tensorwise", "float8.enable_fsdp_float8_all_gather": False,
    "float8.emulate": False, "comm.init_timeout_seconds": 300, "comm.train_timeout_seconds": 100,
    "validation.enable": False, "validation.freq": 10, "validation.steps": -1,
}  # fmt: skip

# What differs under the same key, and what differs whatever the file says.
NOTES_ON_KEYS = {
    "profiling.enable_profiling": "rank 0, once; profiling.ranks and profiling.profile_cycles take more",
    "comm.init_timeout_seconds": (
        "here also the time to tokenise text at the first start: raise it, or run `titanlite prepare` first"
    ),
}
NOTES = (
    "optimizer.weight_decay: titanlite does not decay norms, torchtitan does",
    "initial weights and the order of the data are titanlite's own: losses are not torchtitan's step by step",
)


# ---- keys

BOTH = Keys(
    carried=words(
        """
        training.local_batch_size training.global_batch_size job.dump_folder job.description
        profiling.enable_profiling profiling.profile_freq
        profiling.enable_memory_snapshot metrics.log_freq metrics.enable_tensorboard optimizer.lr
        optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay lr_scheduler.warmup_steps
        lr_scheduler.decay_ratio lr_scheduler.decay_type training.seq_len training.max_norm training.steps
        training.mixed_precision_param training.mixed_precision_reduce training.gc_freq training.seed
        training.deterministic training.enable_cpu_offload parallelism.data_parallel_replicate_degree
        parallelism.data_parallel_shard_degree parallelism.fsdp_reshard_after_forward
        parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree
        parallelism.pipeline_parallel_schedule parallelism.context_parallel_degree checkpoint.folder
        checkpoint.interval checkpoint.export_dtype checkpoint.load_step checkpoint.initial_load_path
        activation_checkpoint.mode activation_checkpoint.selective_ac_option comm.init_timeout_seconds
        comm.train_timeout_seconds
        """
    ),
    replaced={
        "optimizer.name": (chosen("optimizer.name", {"AdamW": "adamw"}), ""),
        "model.tokenizer_path": (
            tokenizer,
            "a tiktoken file of Llama 3's, or a folder with a tokenizer.json",
        ),
        "model.converters": (float8_converter, "other converters than float8 have no counterpart"),
        "training.dataset": (text_source("data.sources"), "files of text; nothing is downloaded"),
        "training.dataset_path": (text_path("data.sources"), "files of text"),
        "checkpoint.async_mode": (
            chosen("checkpoint.async_mode", {"async_with_pinned_mem": "async"}),
            "pinned buffers are what `async` uses",
        ),
        "checkpoint.keep_latest_k": (
            chosen("checkpoint.keep_latest_k", {1: 2}),
            "two at least: with 1, one bad checkpoint would be the run",
        ),
    },
    gone={
        "job.config_file": "the file is the first argument",
        "experimental.custom_import": "job.imports registers components; torchtitan's own do not fit",
        "experimental.custom_args_module": "job.imports registers components, which have keys of their own",
        "profiling.save_traces_folder": "traces are in <dump_folder>/profile",
        "profiling.save_memory_snapshot_folder": "snapshots are in <dump_folder>/profile",
        "metrics.save_tb_folder": "TensorBoard's files are in <dump_folder>/tb",
        "metrics.disable_color_printing": "nothing is coloured",
        "metrics.save_for_all_ranks": "metrics are of all ranks together, and written once",
        "metrics.enable_wandb": "metrics.jsonl and TensorBoard are what is written",
        "model.print_after_conversion": "the log names the layers in float8",
        "optimizer.early_step_in_backward": "the optimizer steps once, after clipping",
        "optimizer.implementation": "fused where the device has it",
        "parallelism.disable_loss_parallel": "under tensor parallel the loss is always divided",
        "parallelism.enable_async_tensor_parallel": "not supported",
        "parallelism.enable_compiled_autograd": "not supported",
        "parallelism.pipeline_parallel_layers_per_stage": "pipeline_parallel_split_points names the stages",
        "parallelism.pipeline_parallel_schedule_csv": "pipeline_parallel_schedule names one of five",
        "parallelism.pipeline_parallel_microbatch_size": "local_batch_size is a pipeline's micro-batch",
        "parallelism.context_parallel_rotate_method": "keys and values are gathered",
        "checkpoint.create_seed_checkpoint": "every layout starts from the same weights by itself",
        "checkpoint.exclude_from_loading": "initial_load_path takes weights alone; a resume takes everything",
        "training.gc_debug": "not supported",
        "memory_estimation.*": "not supported",
        "fault_tolerance.*": "not supported; a run goes on from its checkpoint on any number of ranks",
        "comm.trace_buf_size": "torch's flight recorder is set by its environment variables",
    },
)

V01 = Keys(
    carried=frozenset({"parallelism.pipeline_parallel_split_points"}),
    renamed={
        "training.batch_size": "training.local_batch_size",
        "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
        "training.warmup_steps": "lr_scheduler.warmup_steps",
        "training.compile": "compile.enable",
        "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
        "checkpoint.enable_checkpoint": "checkpoint.enable",
        "validation.enabled": "validation.enable",
        "float8.enable_float8_linear": "float8.enable",
        "float8.recipe_name": "float8.recipe",
        "float8.enable_fsdp_float8_all_gather": "float8.enable_fsdp_float8_all_gather",
        "float8.emulate": "float8.emulate",
        **{
            f"training.{key}": f"parallelism.{key}"
            for key in (
                "data_parallel_replicate_degree",
                "data_parallel_shard_degree",
                "tensor_parallel_degree",
                "fsdp_reshard_after_forward",
            )
        },
        **{
            f"experimental.{key}": f"parallelism.{key}"
            for key in (
                "pipeline_parallel_degree",
                "pipeline_parallel_split_points",
                "context_parallel_degree",
            )
        },
    },
    replaced={
        "float8.filter_fqns": (layers, ""),
        "training.fp8_linear": (lambda value: {"float8.enable": bool(value)}, ""),
        "model.attn_mask_type": (
            chosen("data.mask_documents", {"block_causal": True, "causal": False}),
            "",
        ),
        "experimental.pipeline_parallel_schedule": (
            chosen(
                "parallelism.pipeline_parallel_schedule",
                {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"},
            ),
            "",
        ),
    },
    gone={
        "job.use_for_integration_test": "a test's mark",
        "job.print_args": "`titanlite config FILE` prints what is resolved",
        "metrics.enable_color_printing": "nothing is coloured",
        "metrics.rank_0_only": "metrics are of all ranks together, and written once",
        "model.norm_type": "the family's own: RMSNorm",
        "model.use_flex_attn": "attention.backend chooses the kernel, by itself",
        "optimizer.fused": "fused where the device has it",
        "training.enable_loss_parallel": "under tensor parallel the loss is always divided",
        "training.disable_loss_parallel": "under tensor parallel the loss is always divided",
        "experimental.enable_async_tensor_parallel": "not supported",
        "experimental.enable_compiled_autograd": "not supported",
        "experimental.context_parallel_rotate_method": "keys and values are gathered",
        "experimental.pipeline_parallel_microbatches": "local_batch_size is a pipeline's micro-batch",
        "checkpoint.interval_type": "checkpoint.interval is in steps",
        "checkpoint.model_weights_only": "`titanlite export`, or checkpoint.export_hf, writes the weights",
        "checkpoint.last_save_model_weights_only": "`titanlite export` writes the weights alone",
        "checkpoint.initial_load_model_weights_only": "initial_load_path takes weights alone",
        "float8.precompute_float8_dynamic_scale_for_fsdp": "always, where weights are gathered in float8",
        "float8.force_recompute_fp8_weight_in_bwd": "activation_checkpoint decides what is recomputed",
        "mx.*": "not supported",
        "memory_estimation.enabled": "not supported",
    },
)

V02 = Keys(
    carried=words(
        """
        profiling.profiler_active profiling.profiler_warmup lr_scheduler.total_steps
        lr_scheduler.min_lr_factor
        parallelism.pipeline_parallel_first_stage_less_layers
        parallelism.pipeline_parallel_last_stage_less_layers checkpoint.enable
        activation_checkpoint.memory_budget compile.enable compile.backend validation.enable validation.freq
        validation.steps
        """
    ),
    renamed={
        "checkpoint.last_save_in_hf": "checkpoint.export_hf",
        "debug.seed": "training.seed",
        "debug.deterministic": "training.deterministic",
        "training.dataloader.num_workers": "data.num_workers",
        "quantize.linear.float8.recipe_name": "float8.recipe",
        "quantize.linear.float8.enable_fsdp_float8_all_gather": "float8.enable_fsdp_float8_all_gather",
        "quantize.linear.float8.emulate": "float8.emulate",
    },
    replaced={
        "model.hf_assets_path": (
            tokenizer,
            "its weights are not looked at: checkpoint.initial_load_path names some",
        ),
        "quantize.linear.float8.filter_fqns": (layers, ""),
        "validation.dataset": (text_source("data.validation_sources"), "files of text"),
        "validation.dataset_path": (text_path("data.validation_sources"), "files of text"),
    },
    gone={
        "job.custom_config_module": "job.imports registers components, which have keys of their own",
        "job.print_config": "`titanlite config FILE` prints what is resolved",
        "job.save_config_file": "<dump_folder>/job.toml, always",
        "training.dtype": "weights and optimizer state are in float32",
        "training.dataloader.persistent_workers": "the loader's own: workers stay, memory is pinned for GPUs",
        "training.dataloader.pin_memory": "the loader's own: workers stay, memory is pinned for GPUs",
        "training.dataloader.prefetch_factor": "the loader's own: workers stay, memory is pinned for GPUs",
        "validation.dataloader.*": "as in training",
        "validation.local_batch_size": "as in training",
        "validation.seq_len": "as in training",
        "parallelism.module_fqns_per_model_part": "pipeline_parallel_split_points names the stages",
        "parallelism.pipeline_parallel_expert_parallel_overlap": "there are no experts",
        "parallelism.context_parallel_load_balancer": "rows are always divided head and tail",
        "parallelism.expert_parallel_degree": "there are no experts",
        "parallelism.expert_tensor_parallel_degree": "there are no experts",
        "parallelism.expert_parallel_comm_backend": "there are no experts",
        "checkpoint.enable_ft_dataloader_checkpoints": "the loader's state is a number, in all checkpoints",
        "checkpoint.initial_load_model_only": "initial_load_path takes weights alone",
        "checkpoint.initial_load_in_hf": "initial_load_path tells formats apart by itself",
        "checkpoint.initial_load_in_hf_quantized": "not supported",
        "checkpoint.last_save_model_only": "`titanlite export` writes the weights alone",
        "checkpoint.enable_first_step_checkpoint": "not supported",
        "checkpoint.load_only": "`titanlite checkpoint verify` reads without training",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "there are no experts",
        "activation_checkpoint.early_stop": "not supported",
        "activation_checkpoint.visualize_memory_budget_pareto": "not supported",
        "activation_checkpoint.preserve_rng_state": "not supported",
        "activation_checkpoint.determinism_check": "not supported",
        "activation_checkpoint.debug": "not supported",
        "compile.components": "blocks and loss are compiled",
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (
            "always, where weights are gathered in float8"
        ),
        "quantize.linear.mx.*": "not supported",
        "quantize.grouped_mm.*": "not supported",
        "comm.save_traces_folder": "torch's flight recorder is set by its environment variables",
        "comm.save_traces_file_prefix": "torch's flight recorder is set by its environment variables",
        "comm.mode": "not supported",
        "debug.deterministic_warn_only": "training.deterministic raises an error",
        "debug.moe_force_load_balance": "there are no experts",
        "training.debug_moe_force_load_balance": "there are no experts",
    },
)
SINCE_0_2_1 = words(
    """
    activation_checkpoint.debug activation_checkpoint.determinism_check
    activation_checkpoint.preserve_rng_state comm.mode debug.deterministic debug.deterministic_warn_only
    debug.moe_force_load_balance debug.seed job.save_config_file lr_scheduler.total_steps
    parallelism.context_parallel_load_balancer parallelism.expert_parallel_comm_backend
    parallelism.pipeline_parallel_expert_parallel_overlap training.dataloader.num_workers
    training.dataloader.persistent_workers training.dataloader.pin_memory
    training.dataloader.prefetch_factor validation.dataloader.num_workers
    validation.dataloader.persistent_workers validation.dataloader.pin_memory
    validation.dataloader.prefetch_factor
    """
)  # keys that 0.2.0 does not have
ERAS = {"0.1 or 0.2": BOTH, "0.1": V01, "0.2": V02}
