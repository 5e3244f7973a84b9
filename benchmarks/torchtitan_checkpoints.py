"""Runs torchtitan 0.3.0 on a CPU, and compares what titanlite makes of its files:

    python benchmarks/torchtitan_checkpoints.py FOLDER > benchmarks/results/torchtitan_checkpoints.json

Its trainer trains small models for three steps, or saves them new on two ranks. The checkpoints are imported,
and the logits compared with its own; `titanlite migrate` reads the JSON of these runs and of all
configurations of its Llama and Qwen3, and the factors of its learning rates are compared.

FOLDER: `pip install --no-deps --target FOLDER torchtitan==0.3.0 tyro typeguard docstring-parser shtab
spmd_types==0.2.3 torch_checkpointing torchdata==0.11.0 einops`. With torch 2.13, which lacks
`torch.distributed.set_timeout` and FSDP's annotations, the functions below stand in; kernels for experts and
the checks for GPUs are left out, and attention is scaled_dot_product_attention."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), sys.argv[1]]

from titanlite.config import toml  # noqa: E402
from titanlite.contrib.migrate import migrate  # noqa: E402
from titanlite.interop.formats import open_weights  # noqa: E402
from titanlite.interop.weights import check, load_weights  # noqa: E402
from titanlite.models.base import ModelFamily  # noqa: E402
from titanlite.models.deepseek_v3 import DeepSeekV3  # noqa: E402
from titanlite.optim.warmup_stable_decay import WarmupStableDecay  # noqa: E402

CASES = {  # name: number of ranks
    "llama3": 1, "llama3 tied": 1, "qwen3": 1, "qwen3 experts": 1, "deepseek_v3": 1, "deepseek_v3 lora": 1,
    "llama3 two ranks": 2, "qwen3 two ranks": 2,
}  # fmt: skip
DEEPSEEK = {
    "dim": 256, "n_layers": 2, "n_heads": 16, "vocab_size": 2048, "n_kv_heads": 16, "head_dim": 192,
    "rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "hidden_dim": 1024, "n_dense_layers": 1,
    "n_shared_experts": 2, "n_experts": 8, "n_experts_per_token": 3, "moe_hidden_dim": 256,
    "n_expert_groups": 4, "n_expert_groups_per_token": 2, "routed_scaling_factor": 2.5, "norm_eps": 1e-5,
    "rope_type": "yarn", "rope_factor": 40.0, "rope_original_max_position": 4096, "max_position": 16384,
    "rope_attention_factor": 1.0, "rope_mscale_all_dim": 0.7, "tie_word_embeddings": False,
}  # fmt: skip
SCHEDULES: list[dict[str, Any]] = [
    {"warmup_steps": 200},
    {"warmup_steps": 2, "decay_ratio": 0.8},
    {"warmup_steps": 100, "decay_ratio": 0.2, "decay_type": "cosine", "min_lr_factor": 0.1},
    {"warmup_steps": 50, "decay_type": "sqrt", "min_lr_factor": 0.05},
    {"warmup_steps": 20, "decay_ratio": 0.5, "total_steps": 1500},
]


class StandIn(types.ModuleType):
    """A module whose functions do nothing, and are never called with a result that matters."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *args, **kwargs: {"get_device_name": "cpu"}.get(name, {}))


def load() -> Callable[[str], Any]:
    """Import torchtitan on a CPU; returns a function that imports a module of it."""

    def titan(name: str) -> Any:
        return importlib.import_module(f"torchtitan.{name}")

    device = StandIn("device")
    memory = types.SimpleNamespace(total_memory=1 << 34)
    vars(device).update(
        current_device=lambda: 0, get_device_properties=lambda _: memory, memory_stats=lambda _: {}
    )
    vars(device).update(set_device=lambda _: None)
    vars(torch._utils).update(_get_available_device_type=lambda: "cpu", _get_device_module=lambda _: device)
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = StandIn("kernels")
    vars(torch.distributed).setdefault("set_timeout", None)
    titan("train")
    titan("distributed.utils").set_pg_timeouts = lambda **_: None
    for name in ("float8", "mx", "nvfp4"):
        module = titan(f"components.quantization.{name}")
        for key in [key for key in vars(module) if key.startswith("has_")]:
            setattr(module, key, lambda *_: True)
    fsdp = titan("distributed.fsdp")

    def fully_shard(module: Any, *, dp_mesh_dims: Any = None, **options: Any) -> Any:
        return real(module, **options)

    real, fsdp.fully_shard = fsdp.fully_shard, fully_shard
    return titan


def random_tokens(titan: Callable[[str], Any]) -> Any:
    """The configuration of a data loader of random tokens."""
    base = titan("components.dataloader").ParallelAwareDataloader

    class Tokens(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            generator = torch.Generator().manual_seed(0)
            while True:
                row = torch.randint(2048, (65,), generator=generator)
                yield {"input": row[:-1]}, row[1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Loader(base):  # type: ignore[misc, valid-type]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **_: Any):
            super().__init__(Tokens(), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=2)

    return Loader.Config()


def spec_of(name: str, titan: Callable[[str], Any]) -> Any:
    """torchtitan's small model of a case, with two layers and without FlexAttention."""
    module = titan(f"models.{name.split()[0]}")
    if name == "deepseek_v3 lora":
        module._build_dsv3_layers = functools.partial(_with_lora, module._build_dsv3_layers)
    spec = module.model_registry("debugmodel_moe" if "experts" in name else "debugmodel", attn_backend="flex")
    model = spec.model
    if name == "llama3 tied":
        model.enable_weight_tying = True
        model.tok_embeddings = dataclasses.replace(
            model.tok_embeddings, param_init=module._EMBEDDING_SKIP_INIT
        )
    del model.layers[2:]
    for layer in model.layers:
        layer.attention.inner_attention = titan("models.common.attention").ScaledDotProductAttention.Config()
        if layer.moe and name == "qwen3 experts":
            layer.moe.load_balance_coeff = None  # titanlite's Qwen3 has no bias
        elif layer.moe:
            router = layer.moe.router  # as in 671B
            router.score_func, router.route_norm, router.route_scale = "sigmoid", True, 2.5
            router.num_expert_groups, router.num_limited_groups = 4, 2
    return spec


def _with_lora(build: Any, **fields: Any) -> Any:
    return build(**fields | {"q_lora_rank": 128})


def run(name: str, folder: Path) -> None:
    """Train or save the model of a case with torchtitan's trainer, and record logits."""
    titan = load()
    loss, config = titan("components.loss"), titan("config")
    spec = spec_of(name, titan)
    two = CASES[name] == 2
    job = titan("trainer").Trainer.Config(
        model_spec=spec,
        hf_assets_path="",
        dump_folder=str(folder),
        loss=loss.ChunkedLossWrapper.Config(
            loss_fn=loss.CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
        ),
        optimizer=titan("components.optimizer").default_adamw(lr=3e-3),
        training=config.TrainingConfig(
            local_batch_size=2, seq_len=64, steps=3, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        dataloader=random_tokens(titan),
        activation_checkpoint=None,
        checkpoint=titan("components.checkpoint").CheckpointManager.Config(
            enable=True, last_save_model_only=two
        ),
    )
    job.tokenizer = _no_tokenizer(titan)
    job.optimizer.implementation, job.lr_scheduler.warmup_steps = "for-loop", 1
    job.debug.save_config_file, job.debug.seed = "config.json", 1
    trainer = job.build()
    if two:
        trainer.checkpointer.load()
        trainer.checkpointer.save(3, last_step=True)
    else:
        trainer.train()
    tokens = torch.arange(48)[None] * 37 % 2048
    net = trainer.model_parts[0].eval()
    net._skip_lm_head = False
    with torch.no_grad():
        logits = net(tokens)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    if os.environ["RANK"] == "0":
        torch.save({"tokens": tokens, "logits": logits}, folder / "logits.pt")
    trainer.close()
    torch.distributed.destroy_process_group()


def _no_tokenizer(titan: Callable[[str], Any]) -> Any:
    base = titan("components.tokenizer").BaseTokenizer

    class NoTokenizer(base):  # type: ignore[misc, valid-type]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            pass

        def __init__(self, config: Any, **_: Any):
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        decode = encode

        def get_vocab_size(self) -> int:
            return 2048

    return NoTokenizer.Config()


def family_of(name: str, folder: Path) -> ModelFamily:
    """The model of a case: as `titanlite migrate` reads it, except DeepSeek-V3."""
    if name.startswith("deepseek"):
        return DeepSeekV3(flavor="debug", overrides=DEEPSEEK | {"q_lora_rank": 128 * name.endswith("lora")})
    model = toml.parse(migrate(folder / "config.json")[0])["model"]
    made: ModelFamily = ModelFamily.choices[model.pop("name")](**model)  # type: ignore[assignment]
    return made


def compare(name: str, folder: Path) -> dict[str, float]:
    """The largest difference between titanlite's logits and torchtitan's, and their standard deviation."""
    family, recorded = family_of(name, folder), torch.load(folder / "logits.pt")
    weights, net = open_weights(folder / "checkpoint/step-3", family), family.build()
    check(weights, family)
    net.fill_buffers()
    load_weights(weights, net)
    with torch.no_grad():
        logits = net(recorded["tokens"])
    difference = (logits - recorded["logits"]).abs().max().item()
    return {"largest_difference": difference, "standard_deviation": recorded["logits"].std().item()}


def schedules(titan: Callable[[str], Any]) -> list[dict[str, Any]]:
    """The largest difference of the factors of 1,000 steps, for each of SCHEDULES."""
    rows = []
    for fields in SCHEDULES:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        config = titan("components.optimizer").LRSchedulersContainer.Config(**fields)
        theirs = config.build(optimizers=[optimizer], training_steps=1000)
        ours, worst = WarmupStableDecay(**fields), 0.0
        for step in range(1, 1001):
            worst = max(worst, abs(optimizer.param_groups[0]["lr"] - ours.factor(step, 1000)))
            optimizer.step()
            theirs.step()
        rows.append(fields | {"largest_difference": worst})
    return rows


def configurations(titan: Callable[[str], Any], folder: Path) -> dict[str, dict[str, Any]]:
    """What `titanlite migrate` makes of each configuration of Llama and Qwen3: model and TO DO lines."""
    made = {}
    for family in ("llama3", "qwen3"):
        for name, function in vars(titan(f"models.{family}.config_registry")).items():
            own = getattr(function, "__module__", "").endswith(f"{family}.config_registry")
            if not own or not inspect.isfunction(function) or inspect.signature(function).parameters:
                continue
            try:
                tree = function().to_dict()
            except ValueError as e:
                made[name] = {"not made by torchtitan": str(e)}
                continue
            (folder / "config.json").write_text(json.dumps(tree))
            text, todo = migrate(folder / "config.json")
            keys = list(dict.fromkeys(line.split(":")[0].split(" ")[0] for line in todo))
            made[name] = toml.parse(text)["model"] | {"todo": keys}
    return made


def main() -> None:
    if len(sys.argv) == 4:
        run(sys.argv[2], Path(sys.argv[3]))
        return
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        for port, (name, num_ranks) in enumerate(CASES.items(), start=29650):
            folder = Path(temporary) / name
            ranks = [
                {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(port)}
                for r in range(num_ranks)
            ]
            fixed = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(num_ranks)}
            command = [sys.executable, __file__, sys.argv[1], name, str(folder)]
            runs = [subprocess.Popen(command, env=os.environ | fixed | rank, stdout=2) for rank in ranks]
            if any(process.wait() for process in runs):
                raise SystemExit(f"{name}: torchtitan failed")
            results[name] = compare(name, folder)
        titan = load()
        print(json.dumps({
            "torch": torch.__version__, "torchtitan": "0.3.0", "logits": results,
            "learning rate": schedules(titan), "configurations": configurations(titan, Path(temporary)),
        }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
