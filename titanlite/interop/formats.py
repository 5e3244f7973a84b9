"""Opens the weights in a directory of any supported format. A checkpoint of adapters is opened as the whole
model, with the adapters merged into their base model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.state import BaseModel, read_train
from titanlite.config.component import ConfigError
from titanlite.config.imports import import_own_components
from titanlite.config.paths import check_folder
from titanlite.interop.dcp import is_foreign_dcp, open_titanlite
from titanlite.interop.huggingface import is_hugging_face, is_peft_adapter, open_hugging_face
from titanlite.interop.weights import Chunk, LazyTensor, Region, Weights
from titanlite.models.base import ModelFamily, is_adapter

NOT_THE_BASE = "the weights in {} are not those of the base model that {} were trained on, which were in {}"


class Format(NamedTuple):
    """A format of another program's weights. `matches`: whether a directory has it. `open`: opens the weights
    in a directory for a model family; raises ConfigError or CheckpointError."""

    matches: Callable[[Path], bool]
    open: Callable[[Path, ModelFamily], Weights]


FORMATS: list[Format] = []  # in addition to titanlite's and Hugging Face's
# Writers of weights by the format's name, in addition to Hugging Face's: each makes a directory, with weights
# in fp32, and returns the size of its tensors in bytes.
Writer = Callable[[Weights, Path, ModelFamily], int]
WRITERS: dict[str, Writer] = {}


def open_weights(path: Path, family: ModelFamily, check_base: bool = False) -> Weights:
    """Open the weights in a directory of any supported format, for the model `family`. `check_base`: see
    open_checkpoint. Raises ConfigError or CheckpointError if they cannot be read."""
    check_folder(path, _if_of_a_run(path))
    if is_peft_adapter(path):
        raise ConfigError(
            f"{path} is a PEFT adapter, not a whole model; merge it into its base model (peft: "
            "merge_and_unload, then save_pretrained) and give that directory"
        )
    if is_hugging_face(path):
        return open_hugging_face(path, family)
    if not _is_titanlite(path):
        import_own_components()  # a satellite adds its formats in its module `components`
        for form in FORMATS:
            if form.matches(path):
                return form.open(path, family)
    if steps := [step for _, step in commit.list_committed(path) if is_foreign_dcp(step)]:
        raise ConfigError(f"{path} has checkpoints of another program; give one, such as {steps[-1]}")
    if pickles := sorted(path.glob("pytorch_model*.bin")):
        raise ConfigError(f"{pickles[0]}: pickled weights are not supported; save them as safetensors")
    return open_checkpoint(path, family, check_base=check_base)


def _is_titanlite(path: Path) -> bool:
    """Return whether a step folder, a checkpoint folder or a run folder has a manifest of a checkpoint."""
    return any(any(path.glob(f"{inside}{commit.MANIFEST}")) for inside in ("", "step-*/", "*/step-*/"))


def _if_of_a_run(path: Path) -> str:
    """An explanation for an error message if a run may have deleted the checkpoint `path`."""
    if commit.step_of(path) is None or not path.parent.is_dir():
        return ""
    return (
        "; its run may have deleted it (checkpoint.keep_latest_k) or moved it to an archived-N beside it. An "
        f"empty file {path.name}.keep keeps such a checkpoint"
    )


def open_checkpoint(
    path: Path,
    family: ModelFamily,
    average: bool = False,
    check_base: bool = True,
    base_path: Path | None = None,
) -> Weights:
    """Open the weights of a titanlite checkpoint as open_titanlite does; adapters are merged into their base
    model, in fp64, and rounded to fp32.

    `check_base`: read the base model, to raise ConfigError if it is not the one that the adapters were
    trained on. `base_path`: its directory; None: the recorded one. Raises ConfigError if `base_path` is given
    for weights without adapters."""
    weights = open_titanlite(path, family, average)
    if not has_adapters(weights):
        if base_path is not None:
            raise ConfigError(f"{weights.path} has no adapters: leave out --base")
        return weights
    base = open_base(weights, family, check_base, base_path)
    scale, tensors = lora_of(weights)[2], dict(base.tensors)
    # Buffers that are state change in training, although the base's parameters do not.
    tensors |= {name: stored for name, stored in weights.tensors.items() if not is_adapter(name)}
    for name in weights.tensors:
        if (module := name.removesuffix(".lora_A.weight")) == name:
            continue
        try:
            layer, b = tensors[f"{module}.weight"], weights.tensors[f"{module}.lora_B.weight"]
        except KeyError as e:
            raise ConfigError(f"{weights.path} has an adapter of {module}, but {e} is missing") from None
        tensors[f"{module}.weight"] = _merged(layer, weights.tensors[name], b, scale)
    return replace(weights, tensors=tensors, merged=True)


def has_adapters(weights: Weights) -> bool:
    """Whether `weights` are adapters without their base model."""
    return any(map(is_adapter, weights.tensors))


def open_base(
    adapters: Weights, family: ModelFamily, check_base: bool = True, path: Path | None = None
) -> Weights:
    """Open the base model of a checkpoint's adapters. `check_base`, `path`: see open_checkpoint."""
    recorded = base_of(adapters)
    try:
        base = open_weights(locate_base(path or Path(recorded.path), recorded), family)
    except (ConfigError, CheckpointError, OSError) as e:
        if path is not None:
            raise ConfigError(
                f"--base={path} cannot be opened as the base model of the adapters in {adapters.path}: {e}"
            ) from None
        raise ConfigError(
            f"the base model of the adapters in {adapters.path} cannot be opened: {e}; if it has moved, "
            "`titanlite export` and `titanlite generate` take its directory with --base"
        ) from None
    if check_base and fingerprint(digests(base)) != recorded.sha256:
        raise ConfigError(NOT_THE_BASE.format(base.path, f"the adapters in {adapters.path}", recorded.path))
    return base


def base_of(adapters: Weights) -> BaseModel:
    """The base model that a checkpoint of adapters records. Raises CheckpointError if it records none."""
    base = BaseModel.recorded_in(read_train(adapters.path))
    if base is None:
        raise CheckpointError(f"{adapters.path} is damaged: it has adapters, but no base model")
    return base


def locate_base(path: Path, recorded: BaseModel | None) -> Path:
    """The directory to read a base model from: the recorded one if `path` is a run folder that contained it
    and may have newer checkpoints by now, otherwise `path`. It may not exist any more."""
    if recorded is None or not Path(recorded.path).is_relative_to(path.resolve()):
        return path
    before = Path(recorded.path)
    return before if before.is_dir() or commit.step_of(before) is not None else path


def lora_of(adapters: Weights) -> tuple[int, float, float]:
    """Rank, alpha and scale of a checkpoint's adapters."""
    lora = read_train(adapters.path)["identity"]["lora"]
    rank, alpha = lora["rank"], lora["alpha"]
    return rank, alpha, alpha / rank


def _merged(layer: LazyTensor, a: LazyTensor, b: LazyTensor, scale: float) -> LazyTensor:
    """W + scale B A."""
    ranks = slice(0, a.shape[0])

    def load(region: Region) -> torch.Tensor:
        rows, columns = region
        a_RI, b_OR = a.read((ranks, columns)).double(), b.read((rows, ranks)).double()
        return torch.addmm(layer.read(region).double(), b_OR, a_RI, alpha=scale).float()

    return LazyTensor(layer.shape, torch.float32, layer.file, [Chunk((0, 0), layer.shape, load)])


def digests(weights: Weights, rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
    """SHA-256 of the dtypes, shapes and values of one rank's share of the tensors, by name. Reads them."""
    digest_of = dict[str, str]()
    for name in sorted(weights.tensors)[rank::num_ranks]:
        stored = weights.tensors[name]
        sha = hashlib.sha256(f"{stored.dtype} {stored.shape}".encode())
        for region in stored.row_blocks():
            sha.update(stored.read(region).contiguous().flatten().view(torch.uint8).numpy().data)
        digest_of[name] = sha.hexdigest()
    return digest_of


def fingerprint(digest_of: dict[str, str]) -> str:
    """The fingerprint of weights, from the digests of all tensors by name. It does not depend on the files
    that the tensors are in."""
    return hashlib.sha256(repr(sorted(digest_of.items())).encode()).hexdigest()
