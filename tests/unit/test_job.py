"""Pins the whole job: the rules of job.check, where load_job's errors say they are, components registered
from outside the tree by [job] imports, precedence, and that a resolved job's dump reads back to an equal
job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from titanlite.config import toml
from titanlite.config.component import ConfigError
from titanlite.config.resolve import amounts, value_at
from titanlite.data.sources import Source
from titanlite.job import Job, load_job
from titanlite.metrics.sinks.base import Sink
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import Optimizer
from titanlite.tokenizers.bytes import Bytes

BASE = """\
[model]
name = "llama3"
flavor = "debug"

[training]
local_batch_size = 2
global_batch_size = 16
steps = 100

[lr_scheduler]
warmup_steps = 10

[data]
holdout_sequences = 8

[[data.sources]]
name = "python_stdlib"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(BASE)
    return path


@pytest.fixture
def complaint(path: Path) -> Callable[..., str]:
    """`complaint(*overrides, world_size=1)`: what load_job says, the folder left out."""

    def complaint(*overrides: str, world_size: int = 1, allow_imports: bool = False) -> str:
        with pytest.raises(ConfigError) as e:
            load_job(path, overrides, world_size, allow_imports)
        return str(e.value).replace(f"{path.parent}/", "")

    return complaint


# ---- precedence and the way back


def test_precedence_is_command_line_then_file_then_default(path):
    job = load_job(path, ["--training.steps=200"])
    assert job.training.steps == 200
    assert job.training.local_batch_size == 2
    assert job.training.seed == 0


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--model.overrides.n_layers=2", "--model.overrides={ dim = 64 }", "--job.description=7"],
        [
            "--model.overrides.rope_theta=5e5",
            "--optimizer.lr=1e-300",
            "--checkpoint.allow_changed=['training.seed']",
        ],
        [
            "--tokenizer.name=bytes",
            "--generation.prompts=['caf\u00e9 \"x\"\\n', '']",
            "--no-checkpoint.enable",
        ],
        [
            "--data.sources.1.name=text",
            "--data.sources.1.path=['a.txt', 'b/*.jsonl']",
            "--data.sources.1.weight=3",
        ],
    ],
)
def test_the_dump_of_a_job_reads_back_equal(path, tmp_path, overrides):
    job = load_job(path, overrides)
    dumped = tmp_path / "resolved.toml"
    dumped.write_text(toml.dump(job), encoding="utf-8")
    assert load_job(dumped) == job
    assert toml.dump(load_job(dumped)) == toml.dump(job)


def test_model_overrides_change_the_flavor(path):
    job = load_job(path, ["--model.overrides.n_layers=2"])
    assert job.model.config.n_layers == 2
    assert job.model.config.dim == load_job(path).model.config.dim


# ---- rules that span sections


def test_a_job_that_keeps_the_rules(path):
    assert isinstance(load_job(path, world_size=8), Job)


@pytest.mark.parametrize("world_size", [3, 16])
def test_the_global_batch_divides_over_the_ranks(complaint, world_size):
    message = complaint(world_size=world_size)
    assert message.startswith("job.toml:7: training.global_batch_size: 16 sequences ")
    assert f"local_batch_size 2 x {world_size}" in message


def test_the_nearest_global_batches_are_named(complaint):
    assert complaint(world_size=3).endswith("the nearest are 12 or 18")


def test_a_global_batch_of_minus_one_follows_the_ranks(path):
    assert load_job(path, ["--training.global_batch_size=-1"], world_size=3).training.global_batch_size == -1


@pytest.mark.parametrize(
    ("degree", "others", "said"),
    [
        (4, [], "n_kv_heads = 2 is not divisible by 4: each rank needs its own key and value heads"),
        (3, [], "n_heads = 4 is not divisible by 3; it is divisible by [2, 4]"),
        (2, ["--training.seq_len=33"], "a sequence length of 33 is no multiple of tensor_parallel_degree 2"),
        (2, ["--model.overrides.vocab_size=259"], "vocab_size = 259 is not divisible by 2"),
        (
            2,
            ["--compile.enable", "--activation_checkpoint.mode=selective"],
            "'op' does not work with tensor parallel and compile.enable together",
        ),
    ],
)
def test_what_tensor_parallel_cannot_do_is_refused(complaint, degree, others, said):
    tensor = f"--parallelism.tensor_parallel_degree={degree}"
    assert said in complaint(tensor, "--training.global_batch_size=-1", *others, world_size=12)


@pytest.mark.parametrize("tensor", [1, 2])
def test_context_parallel_takes_sequences_of_whole_pieces(path, complaint, tensor):
    degrees = [
        "--parallelism.context_parallel_degree=2",
        f"--parallelism.tensor_parallel_degree={tensor}",
        "--training.global_batch_size=-1",
    ]
    wrong = f"a sequence length of {6 * tensor} is no multiple of 2 x context_parallel_degree 2"
    assert wrong in complaint(*degrees, f"--training.seq_len={6 * tensor}", world_size=4)
    job = load_job(path, [*degrees, f"--training.seq_len={8 * tensor}"], world_size=4)
    assert job.training.seq_len == 8 * tensor


UNTIED = "--model.overrides.tie_word_embeddings=false"
LOOPED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
NO_BUBBLE = "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([], "embedding and head share a weight, but are in different pipeline stages"),
        (
            [UNTIED, "--training.global_batch_size=4"],
            "1F1B over 4 stages cannot run 2 micro-batches; 4 or a multiple works: "
            "training.global_batch_size = 8, 16, 32",
        ),
        (
            [UNTIED, LOOPED, "--training.global_batch_size=18"],
            "Interleaved1F1B over 8 stages cannot run 9 micro-batches",
        ),
        ([UNTIED, "--model.overrides.n_layers=2"], "make [0, 1, 1, 0]: lower the degree"),
        ([UNTIED, "--parallelism.fsdp_reduce=micro_batch"], "unset fsdp_reduce"),
        ([UNTIED, "--training.mixed_precision_reduce=bfloat16"], "unset mixed_precision_reduce"),
        (
            [UNTIED, NO_BUBBLE, "--parallelism.fsdp_reshard_after_forward=always"],
            "needs weights that stay gathered",
        ),
        (
            [UNTIED, NO_BUBBLE, "--compile.enable"],
            "ZBVZeroBubble computes gradients of weights and of activations separately",
        ),
        ([UNTIED, NO_BUBBLE, "--activation_checkpoint.mode=full"], "use 1F1B or Interleaved1F1B with them"),
        (
            [UNTIED, '--parallelism.pipeline_parallel_split_points=["layers.1", "layers.2"]'],
            "2 split points make 3 stages, not 4",
        ),
        (
            [UNTIED, '--parallelism.pipeline_parallel_split_points=["layers.1", "layers.2", "layers.9"]'],
            "'layers.9' is no block; the blocks are layers.0 to layers.3",
        ),
        (
            [UNTIED, '--parallelism.pipeline_parallel_split_points=["layers.1", "layers.3", "layers.2"]'],
            "are not in order",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(complaint, others, said):
    pipeline = ["--parallelism.pipeline_parallel_degree=4", "--training.global_batch_size=16"]
    layers = ["--model.overrides.n_layers=8"] if NO_BUBBLE in others or LOOPED in others else []
    base = ["--training.local_batch_size=2", "--model.overrides.n_layers=4", *layers]
    assert said in complaint(*pipeline, *base, *others, world_size=4)


def test_the_degrees_multiply_to_the_ranks(complaint):
    assert complaint("--parallelism.data_parallel_shard_degree=4", world_size=2).endswith(
        "data_parallel_shard_degree 4 makes 4 ranks, there are 2; data_parallel_shard_degree = -1 uses all "
        "ranks"
    )


def test_replicas_divide_the_ranks(path, complaint):
    override = "--parallelism.data_parallel_replicate_degree=2"
    assert load_job(path, [override], world_size=4).parallelism.degrees(4) == (1, 2, 2, 1, 1)
    assert "3 ranks are no multiple of data_parallel_replicate_degree 2" in complaint(override, world_size=3)


def test_validation_needs_rows_to_validate_on(path, complaint):
    assert load_job(path, ["--validation.enable"]).validation.enable
    message = complaint("--validation.enable", "--data.holdout_sequences=0")
    assert message.startswith("command line, --validation.enable: there are no sequences to validate on: ")
    assert "set data.holdout_sequences" in message


def test_float8_needs_the_compiler(path, complaint):
    assert "set compile.enable" in complaint("--float8.enable")
    load_job(path, ["--float8.enable", "--compile.enable"])
    load_job(path, ["--float8.enable", "--float8.emulate"])


def test_asynchronous_tensor_parallel_needs_inductor(path, complaint):
    overlapped = "--parallelism.enable_async_tensor_parallel"
    load_job(path, [overlapped])  # no effect without tensor parallel
    split = [overlapped, "--parallelism.tensor_parallel_degree=2"]
    for compiled in ([], ["--compile.enable", "--compile.backend=aot_eager"]):
        assert "set compile.enable, and leave compile.backend" in complaint(*split, *compiled, world_size=2)
    load_job(path, [*split, "--compile.enable"], world_size=2)


def test_a_memory_budget_needs_the_compiler(path, complaint):
    budget = "--activation_checkpoint.mode=memory_budget"
    assert "set compile.enable" in complaint(budget)
    load_job(path, [budget, "--compile.enable"])
    load_job(path, [budget, "--compile.enable", "--compile.backend=aot_eager"])
    assert "'eager' ignores the budget" in complaint(budget, "--compile.enable", "--compile.backend=eager")


def test_an_unknown_backend_of_the_compiler_is_told(complaint):
    said = complaint("--compile.enable", "--compile.backend=induktor")
    assert "compile.backend: unknown backend 'induktor'; did you mean 'inductor'?" in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--training.steps=10"],
            "job.toml:11: lr_scheduler.warmup_steps: 10 steps of warmup need a schedule of",
        ),
        (
            ["--lr_scheduler.total_steps=10"],
            "command line, --lr_scheduler.total_steps: 10 is below training.steps = 100",
        ),
        (
            ["--lr_scheduler.warmup_steps=100"],
            "command line, --lr_scheduler.warmup_steps: 100 steps of warmup need a schedule of more "
            "than 100 steps; set warmup_steps = 10, or -1, which means 10 here",
        ),
    ],
)
def test_warmup_is_shorter_than_the_schedule(complaint, overrides, message):
    assert complaint(*overrides).startswith(message)


def test_a_schedule_longer_than_the_run_may_have_a_warmup_as_long_as_the_run(path):
    job = load_job(path, ["--training.steps=5", "--lr_scheduler.total_steps=100"])
    assert job.lr_scheduler.factor(5, 5) == 0.5


# ---- errors of one section, with their place


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--trainin.steps=1", "command line, --trainin: unknown key 'trainin'; did you mean 'training'?"),
        ("--training.stesp=1", "command line, --training.stesp: unknown key 'stesp'; did you mean 'steps'?"),
        ("--training.steps=0", "command line, --training.steps: 0 is below 1"),
        ("--training.seq_len=0", "command line, --training.seq_len: 0 is below 1"),
        ("--training.global_batch_size=0", "command line, --training.global_batch_size: 0 is neither -1 nor"),
        ("--training.max_norm=-1", "command line, --training.max_norm: -1.0 is below 0"),
        ("--optimizer.eps=inf", "command line, --optimizer.eps: expected a finite number, got inf"),
        ("--optimizer.eps=nan", "command line, --optimizer.eps: expected a finite number, got nan"),
        (
            "--training.deterministic=1",
            "command line, --training.deterministic: expected true or false, got 1",
        ),
        (
            "--training.mixed_precision_param=bf16",
            "command line, --training.mixed_precision_param: 'bf16' is not",
        ),
        (
            "--model.name=lama3",
            "command line, --model.name: unknown model 'lama3'; did you mean 'llama3'?",
        ),
        (
            "--model.flavor=debgu",
            "command line, --model.flavor: unknown llama3 flavor 'debgu'; did you mean 'debug'?",
        ),
        (
            "--model.overrides.n_layer=2",
            "command line, --model.overrides.n_layer: unknown field 'n_layer'; did you",
        ),
        ("--model.overrides.n_layers=2.0", "command line, --model.overrides.n_layers: expected int, got 2.0"),
        (
            "--model.overrides.tie_word_embeddings=1",
            "command line, --model.overrides.tie_word_embeddings: expected bool",
        ),
        (
            "--model.overrides.n_kv_heads=3",
            "command line, --model.overrides.n_kv_heads: n_heads = 4 is not a multiple of n_kv_heads = 3",
        ),
        (
            "--optimizer.name=adam",
            "command line, --optimizer.name: unknown optimizer 'adam'; did you mean 'adamw'?",
        ),
        ("--optimizer.lr=0", "command line, --optimizer.lr: 0.0 is not above 0"),
        ("--tokenizer.num_special_tokens=1", "command line, --tokenizer.num_special_tokens: 1 is below 2"),
        ("--data.sources=[]", "command line, --data.sources: no source to train on"),
        ("--data.sources.0.weight=-1", "command line, --data.sources.0.weight: -1.0 is not in [0, 1e9]"),
        (
            "--data.sources.0.weight=0",
            "command line, --data.sources.0.weight: no source has a weight above 0",
        ),
        (
            "--data.validation_sources=[{ name = 'text', path = ['x'], weight = 0 }]",
            "command line, --data.validation_sources.0.weight: 0; to exclude a source, delete its table",
        ),
        ("--data.sources.0.path=x", "command line, --data.sources.0.path: unknown key 'path'"),
        ("--data.num_workers=-1", "command line, --data.num_workers: -1 is below 0"),
        ("--checkpoint.interval=0", "command line, --checkpoint.interval: 0 is below 1"),
        ("--checkpoint.keep_latest_k=1", "command line, --checkpoint.keep_latest_k: keep 2 or more"),
        ("--validation.freq=0", "command line, --validation.freq: 0 is below 1"),
        (
            "--generation.temperature=-1",
            "command line, --generation.temperature: -1.0 is not 0 or above, and finite",
        ),
        ("--metrics.log_freq=0", "command line, --metrics.log_freq: 0 is below 1"),
        (
            "--parallelism.data_parallel_shard_degree=0",
            "command line, --parallelism.data_parallel_shard_degree: 0 is",
        ),
    ],
)
def test_a_bad_value_is_told_with_its_place(complaint, override, message):
    assert complaint(override).startswith(message)


def test_a_bad_value_in_the_file_is_told_with_its_line(path, complaint):
    path.write_text(BASE.replace("steps = 100", "steps = 0"))
    assert complaint() == "job.toml:8: training.steps: 0 is below 1"


def test_a_job_without_a_model_is_refused(path, complaint):
    path.write_text(BASE.partition("\n\n")[2])
    assert complaint() == "job.toml: missing required key 'model'"


def test_a_job_without_a_file_names_no_file():
    with pytest.raises(ConfigError, match="missing required key 'model'") as e:
        load_job(None, ["--training.steps=500"])
    assert "None" not in str(e.value)


# ---- components from outside the tree


PLUGIN = '''
from dataclasses import dataclass

import torch

from titanlite.optim.base import Optimizer


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer, name="sgd"):
    """Plain gradient descent."""

    momentum: float = 0.0
    """Of the gradient."""

    def build(self, model, mesh):
        return torch.optim.SGD(self.groups(model), lr=self.lr, momentum=self.momentum)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package outside the tree that registers `[optimizer] name = "sgd"`; its module's name."""
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sgd.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Optimizer, "choices", dict(Optimizer.choices))
    yield "elsewhere.sgd"
    for module in [name for name in sys.modules if name.partition(".")[0] == "elsewhere"]:
        del sys.modules[module]


@pytest.mark.parametrize(
    "imports",
    ["--job.imports=['elsewhere.sgd']", "--job.imports.0=elsewhere.sgd", "in the file"],
)
def test_imports_register_components(path, plugin, imports):
    overrides = [imports]
    if imports == "in the file":
        path.write_text(f"job.imports = ['{plugin}']\n{BASE}")
        overrides = []
    with pytest.raises(ConfigError, match="unknown optimizer 'sgd'"):
        load_job(path, ["--job.imports=[]", "--optimizer.name=sgd"])
    job = load_job(path, [*overrides, "--optimizer.name=sgd", "--optimizer.momentum=0.5"], allow_imports=True)
    assert toml.as_tree(job.optimizer) == {
        "name": "sgd", "lr": 3e-4, "weight_decay": 0.1, "param_groups": [], "schedules": [], "momentum": 0.5
    }  # fmt: skip


def test_the_dump_of_a_job_with_imports_reads_back_equal(path, plugin, tmp_path):
    job = load_job(path, [f"--job.imports=['{plugin}']", "--optimizer.name=sgd"], allow_imports=True)
    dumped = tmp_path / "resolved.toml"
    dumped.write_text(toml.dump(job))
    assert load_job(dumped, allow_imports=True) == job


@pytest.mark.parametrize("imports", ["imports = ['elsewhere.sgd']\n", "imports.0 = 'elsewhere.sgd'\n"])
def test_imports_do_not_run_unless_they_are_allowed(path, plugin, tmp_path, complaint, imports):
    (tmp_path / "elsewhere" / "sgd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path.write_text(f"[job]\n{imports}{BASE}")
    said = "this would run the code of elsewhere.sgd; if you trust it, add --allow-imports"
    assert complaint() in (f"job.toml:{line}: job.imports: {said}" for line in (1, 2))
    assert not (tmp_path / "ran").exists()
    load_job(path, allow_imports=True)
    assert (tmp_path / "ran").exists()


def test_the_current_directory_comes_first(path, tmp_path, monkeypatch, complaint):
    """As with `python -m titanlite.cli`. A file that cannot be imported under its name is an error."""
    for name in ("lies_here", "sched", "numpy"):  # a module of Python's library, and one that is loaded
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    for name in ("lies_here", "sched"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        load_job(path, [f"--job.imports=['{name}']"], allow_imports=True)
        assert (tmp_path / name).exists()
        del sys.modules[name]
    message = complaint("--job.imports=['numpy']", allow_imports=True)
    assert message.startswith("command line, --job.imports: cannot import 'numpy': ")
    assert message.endswith("numpy/__init__.py has the same name; rename numpy.py")


@pytest.mark.parametrize("module", ["./elsewhere", "elsewhere/sgd", "elsewhere.sgd.py"])
def test_a_file_in_place_of_a_module_is_told(plugin, complaint, module):
    message = complaint(f"--job.imports=['{module}']", allow_imports=True)
    assert message.endswith("; name a module: write package.module, without a folder and without .py")


def test_a_mistake_that_python_finds_is_told_with_the_line_of_the_module(plugin, tmp_path, complaint):
    text = PLUGIN.replace("frozen=True, ", "")
    (tmp_path / "elsewhere" / "sgd.py").write_text(text)
    line = text.splitlines().index("@dataclass(kw_only=True)") + 1
    message = complaint(f"--job.imports=['{plugin}']", allow_imports=True)
    assert f"'{plugin}': elsewhere/sgd.py:{line}: TypeError: cannot inherit non-frozen" in message


def test_an_import_does_not_replace_a_component_of_titanlites_unseen(path, plugin, tmp_path):
    text = PLUGIN.replace('class SGD(Optimizer, name="sgd")', 'class AdamW(Optimizer, name="adamw")')
    (tmp_path / "elsewhere" / "sgd.py").write_text(text)
    with pytest.raises((TypeError, ConfigError), match="'adamw' already names"):
        load_job(path, [f"--job.imports=['{plugin}']"], allow_imports=True)
    assert Optimizer.choices["adamw"] is AdamW


@pytest.mark.parametrize("module", ["no.such.module", "", ".relative"])
def test_an_import_that_fails_is_an_error_with_its_place(complaint, module):
    message = complaint(f"--job.imports=['{module}']", allow_imports=True)
    assert message.startswith(f"command line, --job.imports: cannot import '{module}'")


def test_a_failing_import_inside_an_imported_module_is_told(path, plugin, tmp_path, complaint):
    (tmp_path / "elsewhere" / "sgd.py").write_text("import missing_dependency_of_it\n")
    message = complaint(f"--job.imports=['{plugin}']", allow_imports=True)
    assert "No module named 'missing_dependency_of_it'" in message


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("x = 1\nif x\n", 2, "SyntaxError: expected ':'"),
        ("x = 1\n\ty = 2\n", 2, "IndentationError: unexpected indent"),
        ("def f():\n    raise RuntimeError('no\\nGPU')\n\n\nf()\n", 2, "RuntimeError: no GPU"),
        ("{}['key']\n", 1, "KeyError: 'key'"),
        ("\nassert False\n", 2, "AssertionError"),
        ("from titanlite.optim.adamw import Adam\n", 1, "cannot import name 'Adam' from 'titanlite.optim"),
        ("import importlib\nimportlib.import_module('.x')\n", 2, "TypeError: the 'package' argument is"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_mistake_in_an_imported_module_is_told_with_its_place(
    path, plugin, tmp_path, complaint, text, line, said
):
    (tmp_path / "elsewhere" / "sgd.py").write_text(text)
    message = complaint(f"--job.imports=['{plugin}']", allow_imports=True)
    assert message.startswith(
        f"command line, --job.imports: cannot import '{plugin}': elsewhere/sgd.py:{line}: {said}"
    )
    assert "\n" not in message
    is_told = said.startswith(("SyntaxError", "IndentationError"))
    assert message.endswith(f'; for the traceback: python -c "import {plugin}"') == (not is_told)


def test_a_component_that_takes_a_name_is_told_with_its_own_place(path, plugin, tmp_path, complaint):
    text = PLUGIN.replace('class SGD(Optimizer, name="sgd")', 'class AdamW(Optimizer, name="adamw")')
    (tmp_path / "elsewhere" / "sgd.py").write_text(text)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.startswith(("@", "class"))]
    message = complaint(f"--job.imports=['{plugin}']", allow_imports=True)
    assert any(
        f": elsewhere/sgd.py:{number}: TypeError: 'adamw' already names" in message for number in lines
    )


COMPONENTS = """
from dataclasses import dataclass

from titanlite.config.component import ConfigError
from titanlite.config.resolve import amounts, value_at
from titanlite.metrics.sinks.base import Sink
from titanlite.optim.base import Optimizer
from titanlite.corpus.document_source import DocumentSource


@dataclass(frozen=True, kw_only=True)
class NoBuild(Optimizer, name="no_build"):
    def __post_init__(self):
        pass


@dataclass(frozen=True, kw_only=True)
class BuildsNothing(NoBuild, name="builds_nothing"):
    def build(self, model, mesh):
        pass


@dataclass(frozen=True, kw_only=True)
class Empty(DocumentSource, name="empty"):
    def documents(self):
        pass


@dataclass(frozen=True, kw_only=True)
class NoDocuments(Empty, name="no_documents"):
    def fingerprint(self):
        return ""


class Dictionary(Sink, name="dictionary"):
    def build(self, run):
        return {}
"""


@pytest.fixture
def components(plugin, tmp_path, monkeypatch) -> str:
    """An override that imports components with mistakes."""
    for kind in (Sink, Source):
        monkeypatch.setattr(kind, "choices", dict(kind.choices))
    (tmp_path / "elsewhere" / "sgd.py").write_text(COMPONENTS)
    return f"--job.imports=['{plugin}']"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--optimizer.name=no_build", "optimizer: elsewhere.sgd.NoBuild lacks build"),
        ("--data.sources.0.name=empty", "data.sources.0: elsewhere.sgd.Empty lacks fingerprint"),
        (
            "--optimizer={ name = 'builds_nothing', lr = -1.0 }",
            "command line, --optimizer.lr: -1.0 is not above 0 and finite",
        ),
    ],
)
def test_a_component_that_lacks_a_method_or_a_check_is_refused(components, complaint, override, said):
    """The base class's keys are checked, although NoBuild.__post_init__ does not call super()."""
    assert complaint(components, override, allow_imports=True).endswith(said)


def test_a_build_that_returns_another_type_is_told(components, path, tmp_path):
    overrides = ["--optimizer.name=builds_nothing", "--data.sources.0.name=no_documents"]
    sinks = "--metrics.sinks=[{ name = 'dictionary' }]"
    job = load_job(path, [components, sinks, *overrides], allow_imports=True)
    said = "elsewhere.sgd.BuildsNothing.build returned None; expected Optimizer"
    with pytest.raises(ConfigError, match=said):
        job.optimizer.build(None, None)
    said = "elsewhere.sgd.Dictionary.build returned an object of type dict; expected Writer"
    with pytest.raises(ConfigError, match=said):
        job.metrics.sinks[0].build(None)
    said = "elsewhere.sgd.NoDocuments.documents returned None; expected an iterable"
    with pytest.raises(ConfigError, match=said):
        job.data.sources[0].build(Bytes().build(), tmp_path)


def test_imports_of_the_wrong_type_are_refused(complaint):
    assert complaint("--job.imports=5") == (
        "command line, --job.imports: expected a list, got 5; write --job.imports='[\"5\"]'"
    )


def test_a_job_section_that_is_no_table_is_refused(path, complaint):
    path.write_text(f"job = 3\n{BASE}")
    assert complaint() == "job.toml:1: job: expected a table, got 3"


# ---- amounts of training

TOKENS = "--training.steps=10M tokens"  # BASE has sequences of 2,048 tokens


@pytest.mark.parametrize(
    ("overrides", "world_size", "steps"),
    [
        ([TOKENS], 1, 305),
        ([TOKENS], 4, 305),
        ([TOKENS, "--training.global_batch_size=-1"], 1, 2441),
        ([TOKENS, "--training.global_batch_size=-1"], 4, 610),
        (["--training.steps=4882 sequences"], 4, 305),
        (["--training.steps=20 tokens/parameter"], 4, 20 * 1836160 // 2048 // 16),
        (["--training.steps=2 epochs"], 4, 37),
        (["--training.steps=0.3K steps"], 4, 300),
    ],
)
def test_amounts_become_steps_of_the_ranks_batches(path, overrides, world_size, steps):
    job = load_job(path, overrides, world_size)
    assert type(job.resolved(world_size, epoch_sequences=300).training.steps) is int
    assert job.resolved(world_size, epoch_sequences=300).training.steps == steps


def test_every_section_with_numbers_of_steps_takes_amounts(path):
    keys = [
        "lr_scheduler.warmup_steps", "lr_scheduler.decay_start", "lr_scheduler.total_steps", "ema.start_step",
        "ema.freq", "checkpoint.interval", "checkpoint.keep_every_n_steps",
        "validation.freq", "generation.freq", "metrics.log_freq", "metrics.detail_freq",
        "metrics.probe_freq", "metrics.digest_freq",
    ]  # fmt: skip
    given = [f"--{key}={i + 1} epochs" for i, key in enumerate(keys)]
    job = load_job(path, ["--training.steps=2 epochs", *given])
    assert amounts(job).keys() == {"training.steps", *keys}
    job = job.resolved(1, epoch_sequences=170)
    multiples = {"checkpoint.keep_every_n_steps": 63}
    for i, key in enumerate(keys):
        assert value_at(job, key) == multiples.get(key, 170 * (i + 1) // 16)


POINTS = "lr_scheduler.points"
ENDS_EARLY = "is below training.steps = 100: the schedule would end before the run"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.steps", "0 tokens", "'0 tokens' is not above 0"),
        ("training.steps", "4B tokns", "unknown unit 'tokns' of '4B tokns'; did you mean 'tokens'? (known: "),
        (
            "training.steps",
            "32767 tokens",
            "'32767 tokens' is less than one step, which takes 16 sequences of ",
        ),
        ("training.steps", "9000000T tokens/parameter", " tokens are 2^63 tokens or more, which cannot be "),
        ("training.seq_len", "2K tokens", "expected an integer, got '2K tokens'"),
        ("checkpoint.load_step", "1B tokens", "expected an integer, got '1B tokens'"),
        ("lr_scheduler.total_steps", "99 steps", f"99 {ENDS_EARLY}"),
        ("lr_scheduler.total_steps", "1M tokens", f"30 {ENDS_EARLY}"),
        (POINTS, "[[0, '1B tokens']]", "1B tokens of [0.0, '1B tokens'] is not a factor"),
        (POINTS, "[['1B tokens', 1], ['1M tokens', 0]]", "step 30 does not come after step 30517"),
    ],
)
def test_amounts_that_are_refused_before_the_data_is_open(path, complaint, key, value, message):
    path.write_text(BASE.replace("[lr_scheduler]\nwarmup_steps = 10\n", ""))
    name = ["--lr_scheduler.name=piecewise"] if key == POINTS else []
    said = complaint(*name, f"--{key}={value}")
    assert said.startswith(f"command line, --{key}: ")
    assert message in said
    assert "\n" not in said


def test_the_rules_on_steps_wait_for_the_epochs(path):
    job = load_job(path, ["--training.steps=1 epoch", "--lr_scheduler.total_steps=20"])
    assert str(job.resolved(1).training.steps) == "1 epoch"
    assert job.resolved(1, 16 * 20).training.steps == 20
    with pytest.raises(ConfigError, match="20 is below training"):
        job.resolved(1, 16 * 21)


# ---- numbers and names beyond any machine


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--training.steps=1000000000000000000", "2^63 tokens or more, which cannot be counted"),
        ("--training.local_batch_size=1099511627776", "2^31 tokens or more, too many for one micro-batch"),
        ("--job.dump_folder=a\udcffb", "is not UTF-8, so no TOML file can record it"),
        ("--job.dump_folder=a\0b", "contains a NUL character"),
        (f"--job.dump_folder={'x' * 256}", "cannot be made: File name too long"),
        (f"--data.cache_dir={'x' * 256}", "cannot be made: File name too long"),
    ],
)
def test_what_no_machine_takes_is_refused(complaint, override, message):
    said = complaint(override)
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("key", ["job.dump_folder", "data.cache_dir"])
@pytest.mark.parametrize("below", ["", "/run"])
def test_a_folder_that_is_a_link_to_nowhere_is_refused(tmp_path, complaint, key, below):
    (tmp_path / "link").symlink_to("nowhere")
    said = complaint(f"--{key}={tmp_path}/link{below}")
    assert said == f"command line, --{key}: link{below} cannot be made: link is a link that leads nowhere"


@pytest.mark.parametrize("source", ['{name="python_stdlib"}', '{name="tokens",path="d"}'])
def test_a_cache_that_may_be_complete_or_is_not_used_may_be_read_only(path, monkeypatch, complaint, source):
    (path.parent / "cache").mkdir()
    monkeypatch.setattr(os, "access", lambda folder, mode: Path(folder) != path.parent / "cache")
    overrides = [f"--data.sources=[{source}]", f"--job.dump_folder={path.parent}/out"]
    load_job(path, [*overrides, f"--data.cache_dir={path.parent}/cache"])
    overrides.append(f"--data.cache_dir={path.parent}/cache/new")
    if "tokens" in source:
        load_job(path, overrides)
    else:
        assert complaint(*overrides) == (
            "command line, --data.cache_dir: cache/new cannot be written: cache is not a writable directory"
        )
