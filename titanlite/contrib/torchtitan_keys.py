"""How `titanlite migrate` translates torchtitan's keys: tables, and functions of one value.

The tables hold for the TOML files of torchtitan 0.1.0 to 0.2.2, and for the JSON of 0.3.0's trainer, which
torchtitan_json.py reads. A torchtitan key that is in no table has the same name and meaning in titanlite;
docs/coming-from.md lists all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Values = dict[str, Any]  # titanlite's dotted keys and their values


class Conversion(NamedTuple):
    """A key whose value changes. `key`: titanlite's key. `convert`: maps torchtitan's value to titanlite's
    keys and their values; raises ValueError, with advice for the user, for a value without a counterpart."""

    key: str
    convert: Callable[[Any], Values]
    note: str


def to_async_mode(value: str) -> Values:
    return {"checkpoint.async_mode": "disabled" if value == "disabled" else "async"}


def to_optimizer(value: str) -> Values:
    return {"optimizer.name": value.lower()}


def to_state_dtype(implementation: str) -> Values:
    return {"optimizer.state_dtype": "bfloat16"} if implementation == "fused_opt_states_bf16" else {}


def to_mode(policy: str) -> Values:
    return {"activation_checkpoint.mode": policy, "activation_checkpoint.selective_ac_option": "op"}


def to_loss(name: str) -> Values:
    if name == "other":
        raise ValueError("titanlite has cross-entropy, whole or in chunks: set loss.name")
    return {"loss.name": name}


def to_sources(sources: list[Values]) -> Values:
    if any("sample_processor" in source for source in sources):
        raise ValueError("the source `chat` reads conversations")
    made = [
        {
            "name": "text",
            "path": [each.get("dataset_path") or each.get("dataset")],
            "weight": each.get("weight", 1),
        }
        for each in sources
    ]
    return {"data.sources": made}


def to_tokenizer(path: str) -> Values:
    if path.endswith(".model"):
        return {"tokenizer": {"name": "tiktoken", "path": path, "num_special_tokens": 256}}
    return {"tokenizer": {"name": "huggingface", "path": path}}


def to_float8(value: list[str] | str) -> Values:
    converters = {word.strip() for word in (value.split(",") if isinstance(value, str) else value)} - {""}
    if converters - {"float8", "quantize.linear.float8"}:
        raise ValueError("float8 is titanlite's only converter: set float8.enable")
    return {"float8.enable": bool(converters)}


def to_filter(value: list[str] | str) -> Values:
    if value not in (["output"], "output", [], ""):
        raise ValueError("these are torchtitan's layers: set float8.filter_fqns to titanlite's names")
    return {"float8.filter_fqns": []}


def to_exchange(value: str) -> Values:
    if value != "standard":
        raise ValueError("titanlite has 'all_to_all' and 'gather', and chooses by the degree")
    return {"parallelism.expert_parallel_comm_backend": "default"}


def to_sink(name: str) -> Callable[[bool], Values]:
    """Return the conversion of the key that turns a sink on."""
    return lambda is_on: {"metrics.sinks": [{"name": name}]} if is_on else {}


def text_of(key: str) -> Conversion:
    """Return the conversion of a data set's name or path to a source of text files."""
    return Conversion(
        key, lambda value: {key: [{"name": "text", "path": [value]}]} if value else {}, "a folder of text"
    )


FILTER = Conversion("float8.filter_fqns", to_filter, "with titanlite's names; the head is never float8")
TOKENIZER = Conversion("tokenizer", to_tokenizer, "a tiktoken file, or a folder with a tokenizer.json")

# ---- keys of torchtitan that titanlite does not have, or has with other values

RENAMED = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "dataloader.num_workers": "data.num_workers",
    "debug.deterministic": "training.deterministic",
    "debug.moe_force_load_balance": "moe.force_load_balance",
    "debug.seed": "training.seed",
    "dump_folder": "job.dump_folder",
    "float8.recipe_name": "float8.recipe",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "profiler.enable_memory_snapshot": "profiling.enable_memory_snapshot",
    "profiler.enable_profiling": "profiling.enable_profiling",
    "profiler.profile_freq": "profiling.profile_freq",
    "profiler.profiler_active": "profiling.profiler_active",
    "profiler.profiler_warmup": "profiling.profiler_warmup",
    "quantize.linear.float8.emulate": "float8.emulate",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.recipe_name": "float8.recipe",
    "training.compile": "compile.enable",
    "training.dataloader.num_workers": "data.num_workers",
    "training.debug_moe_force_load_balance": "moe.force_load_balance",
    "validator.enable": "validation.enable",
    "validator.freq": "validation.freq",
    "validator.steps": "validation.steps",
}

CONVERTED = {
    "activation_checkpoint": Conversion("activation_checkpoint.mode", to_mode, "by the policy's keys"),
    "checkpoint.async_mode": Conversion("checkpoint.async_mode", to_async_mode, "`async` pins host memory"),
    "dataloader.dataset": text_of("data.sources"),
    "dataloader.dataset_path": text_of("data.sources"),
    "dataloader.sources": Conversion("data.sources", to_sources, "folders of text, with their weights"),
    "float8.filter_fqns": FILTER,
    "hf_assets_path": TOKENIZER,
    "loss": Conversion("loss.name", to_loss, "by the loss's keys"),
    "metrics.enable_tensorboard": Conversion("metrics.sinks", to_sink("tensorboard"), "names tensorboard"),
    "metrics.enable_wandb": Conversion("metrics.sinks", to_sink("wandb"), "names wandb"),
    "model.converters": Conversion("float8.enable", to_float8, "true if it names float8"),
    "model.hf_assets_path": TOKENIZER,
    "model.tokenizer_path": TOKENIZER,
    "optimizer.implementation": Conversion(
        "optimizer.state_dtype", to_state_dtype, "`bfloat16` if it is `fused_opt_states_bf16`"
    ),
    "optimizer.name": Conversion("optimizer.name", to_optimizer, "in lower case"),
    "quantize.linear.float8.filter_fqns": FILTER,
    "parallelism.expert_parallel_comm_backend": Conversion(
        "parallelism.expert_parallel_comm_backend", to_exchange, "`default` if it is `standard`"
    ),
    "training.dataset": text_of("data.sources"),
    "training.dataset_path": text_of("data.sources"),
    "validation.dataset": text_of("data.validation_sources"),
    "validation.dataset_path": text_of("data.validation_sources"),
    "validator.dataloader.dataset": text_of("data.validation_sources"),
    "validator.dataloader.dataset_path": text_of("data.validation_sources"),
}

_REASONS = {  # reason why there is no counterpart: keys; a key that ends with a dot is a section
    "not supported": """
        activation_checkpoint.debug activation_checkpoint.determinism_check activation_checkpoint.early_stop
        activation_checkpoint.preserve_rng_state activation_checkpoint.visualize_memory_budget_pareto
        checkpoint.enable_first_step_checkpoint checkpoint.initial_load_in_hf_quantized comm.mode
        experimental.custom_args_module experimental.custom_import fault_tolerance. job.custom_config_module
        memory_estimation. metrics.disable_color_printing mx. optimizer.early_step_in_backward
        parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method
        activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
        parallelism.enable_compiled_autograd parallelism.enable_fsdp_symm_mem
        parallelism.pipeline_parallel_expert_parallel_overlap quantize.grouped_mm.mx.
        quantize.linear.mx. training.dtype training.gc_debug
        activation_checkpoint.force_recompute_mm_shapes_by_fqns dataloader.seed dataloader.stopping_strategy
        debug.batch_invariant debug.detect_anomaly debug.enable_structured_logging debug.spmd_typechecking
        optimizer.optimizer_factory_kwargs_by_name. override.imports parallelism.spmd_backend
        parallelism.context_parallel_ptrr_mask_key profiler.memory_snapshot_freq
        profiler.memory_snapshot_max_entries profiler.profiler_skip_first profiler.profiler_skip_first_wait
        profiler.profiler_repeat profiler.trace_post_processor
    """,
    "experts are not sharded inside": "parallelism.expert_tensor_parallel_degree",
    "always so": """
        checkpoint.create_seed_checkpoint checkpoint.enable_ft_dataloader_checkpoints compile.components
        float8.precompute_float8_dynamic_scale_for_fsdp job.save_config_file metrics.save_for_all_ranks
        model.print_after_conversion parallelism.disable_loss_parallel parallelism.enable_sequence_parallel
        quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp training.dataloader.persistent_workers
        training.dataloader.pin_memory training.dataloader.prefetch_factor
        dataloader.persistent_workers dataloader.pin_memory dataloader.prefetch_factor
    """,
    "training.deterministic makes non-deterministic operations errors": "debug.deterministic_warn_only",
    "activation_checkpoint decides": "float8.force_recompute_fp8_weight_in_bwd",
    "files are below job.dump_folder": """
        metrics.save_tb_folder profiler.save_memory_snapshot_folder profiler.save_traces_folder
        profiling.save_memory_snapshot_folder profiling.save_traces_folder
    """,
    "an argument of `titanlite train`": "job.config_file",
    "`titanlite config FILE` prints the job": """
        debug.print_config debug.save_config_file job.print_args job.print_config
    """,
    "for torchtitan's own tests": "job.use_for_integration_test",
    "pipeline_parallel_split_points names the stages": """
        parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_layers_per_stage
    """,
    "pipeline_parallel_schedule names one": "parallelism.pipeline_parallel_schedule_csv",
    "local_batch_size is the micro-batch": "parallelism.pipeline_parallel_microbatch_size",
    "initial_load_path reads weights alone, in any format": """
        checkpoint.exclude_from_loading checkpoint.initial_load_model_only
        checkpoint.initial_load_model_weights_only
    """,
    "initial_load_path becomes hf_assets_path, unless it is set": "checkpoint.initial_load_in_hf",
    "`titanlite export` writes the weights alone, with any dtype": """
        checkpoint.export_dtype checkpoint.last_save_in_hf checkpoint.last_save_model_only
        checkpoint.last_save_model_weights_only
    """,
    "`titanlite checkpoint verify` reads without training": "checkpoint.load_only",
    "as in training": """
        validation.dataloader. validation.local_batch_size validation.seq_len validator.dataloader.
    """,
    "compile.cuda_graphs = false turns them off": "training.disable_cuda_graphs",
    "float8.experts is for the experts of all layers": "quantize.grouped_mm.float8.fqns",
    "loss.chunk_tokens is the size of a chunk": "loss.num_chunks",
    "max_epochs of a source ends its data": "dataloader.infinite",
    "the source `chat` reads conversations": """
        dataloader.load_dataset_kwargs. dataloader.sample_processor
    """,
    "the model decides": "loss.global_vocab_size loss.loss_fn.global_vocab_size",
    "PyTorch's environment variables set it": """
        comm.save_traces_file_prefix comm.save_traces_folder comm.trace_buf_size
    """,
}
NO_COUNTERPART = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}

# Keys without a counterpart that may change the training, and the value that does not change it.
HARMLESS: Values = {
    "checkpoint.exclude_from_loading": [],
    "checkpoint.initial_load_in_hf_quantized": False,
    "checkpoint.initial_load_model_only": True,
    "checkpoint.initial_load_model_weights_only": True,
    "dataloader.infinite": True,
    "dataloader.sample_processor": None,
    "experimental.custom_args_module": "",
    "experimental.custom_import": "",
    "fault_tolerance.enable": False,
    "job.custom_config_module": "",
    "optimizer.early_step_in_backward": False,
    "override.imports": [],
    "training.dtype": "float32",
}

# torchtitan's defaults where titanlite's differ; the same in all releases. 0.3's JSON leaves out no key.
DEFAULTS: Values = {
    "profiling.profiler_warmup": 3, "metrics.sinks": [], "optimizer.lr": 8e-4,
    "lr_scheduler.warmup_steps": 200, "training.mixed_precision_param": "bfloat16", "data.num_workers": 0,
    "checkpoint.enable": False, "checkpoint.async_mode": "disabled",
    "activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2",
    "float8.enable_fsdp_float8_all_gather": False, "comm.init_timeout_seconds": 300,
    "comm.train_timeout_seconds": 100, "validation.freq": 10,
}  # fmt: skip

# torchtitan's flavor -> titanlite's flavor, and the architecture fields that differ.
_DEBUG_LLAMA = {
    "dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "head_dim": 16, "hidden_dim": 768,
    "vocab_size": 2048, "tie_word_embeddings": False, "rope_factor": 8.0,
}  # fmt: skip
_DEBUG_QWEN = {
    "dim": 256, "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 3072,
    "vocab_size": 2048,
}  # fmt: skip
_DEBUG_EXPERTS = {
    **_DEBUG_QWEN, "tie_word_embeddings": False, "n_experts": 64, "n_experts_per_token": 8,
    "moe_hidden_dim": 768,
}  # fmt: skip
_QWENS = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
FLAVORS: dict[str, dict[str, tuple[str, Values]]] = {
    "llama3": {"debugmodel": ("debug", _DEBUG_LLAMA), **{size: (size, {}) for size in ("8B", "70B", "405B")}},
    "qwen3": {
        "debugmodel": ("debug", _DEBUG_QWEN), **{size: (size, {}) for size in _QWENS},
        "debugmodel_moe": ("debug", _DEBUG_EXPERTS), "30B-A3B": ("30B-A3B", {}),
        "235B-A22B": ("235B-A22B", {"rope_theta": 5e6}),
    },
}  # fmt: skip
WITH_EXPERTS = {"debugmodel_moe", "30B-A3B", "235B-A22B"}  # flavors of qwen3 that are titanlite's qwen3_moe
MASKED = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")  # suffixes of flavors that mask documents
