"""`checkpoint.initial_load_path`: the weights that a new run starts from, in any format that is known.

They are looked at, all names and shapes, before the run writes anything; then each rank reads its own part.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.resume import Candidate, Verification
from titanlite.checkpoint.state import listed, model_tensors, non_finite
from titanlite.config.component import ConfigError
from titanlite.files import if_on_hub
from titanlite.interop.dcp import open_titanlite
from titanlite.interop.huggingface import is_adapter, is_hugging_face, open_hugging_face, tell_generation
from titanlite.interop.torchtitan_meta import is_foreign_dcp, is_meta, open_meta, open_torchtitan
from titanlite.interop.weights import (
    ModelAndTokenizer,
    Weights,
    check,
    check_tokenizer,
    load_weights,
    vocabulary_of,
)
from titanlite.log import logger
from titanlite.models.base import ModelFamily

KEY = "checkpoint.initial_load_path"
TO_CHANGE_IT = "to change it on purpose, take `titanlite export`'s directory, which has no record of it"


def open_weights(path: Path, family: ModelFamily) -> Weights:
    """The weights in a directory, whichever format they have; `family` is the model they are for. Raises
    ConfigError or CheckpointError if they cannot be read."""
    if path.is_file():
        raise ConfigError(f"{path} is a file; name the directory that holds it: {path.parent}")
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory{if_on_hub(path)}")
    if is_adapter(path):
        raise ConfigError(
            f"{path} is a PEFT adapter, not a whole model; merge it into its base model (peft: "
            "merge_and_unload, then save_pretrained) and name that directory"
        )
    if is_hugging_face(path):
        return open_hugging_face(path, family)
    if is_meta(path):
        return open_meta(path, family)
    if is_foreign_dcp(path):
        return open_torchtitan(path, family)
    if inside := [step for _, step in commit.committed(path) if is_foreign_dcp(step)]:
        raise ConfigError(f"{path} has checkpoints that are not titanlite's; name one, such as {inside[-1]}")
    if pickles := sorted(path.glob("pytorch_model*.bin")):
        raise ConfigError(f"{pickles[0]}: pickled weights are not read; save them as safetensors")
    return open_titanlite(path, family)


def check_initial(path: Path, exchange: ModelAndTokenizer) -> None:
    """Raises ConfigError unless there are weights for the exchange's model and tokenizer at `path`. On one
    rank."""
    family = exchange.family
    try:
        weights = open_weights(path, family)
        check(weights, family)
        check_tokenizer(weights, exchange.tokenizer, TO_CHANGE_IT)
        tell_generation(weights, exchange.tokenizer)
    except (ConfigError, CheckpointError, OSError) as e:
        raise ConfigError(str(e), KEY) from None
    with torch.device("meta"):
        net = family.build()
    rows = min(weights.tensors[name].shape[0] for name in vocabulary_of(net))
    if rows < net.vocab_size:
        logger.info(
            f"{path} has {rows} rows of the vocabulary: the model's other {net.vocab_size - rows} start as a "
            "new model's"
        )


def load_initial(path: Path, family: ModelFamily, net: nn.Module, ranks: Ranks) -> None:
    """Read each rank's part of the weights into `net`. Collective; an error on one rank is raised on all."""
    path = ranks.agree(lambda: _resolved(path, family))  # once: a run that still trains saves another step
    problem: tuple[bool, str] | None = None
    error: Exception | None = None
    kind = ""
    try:
        weights = open_weights(path, family)
        kind = weights.kind
        logger.info(f"reading the initial weights from {path} ({kind})")
        load_weights(weights, net)
        if names := non_finite({"model": model_tensors(net)}):
            raise ConfigError(f"{path}: {listed(names)} has values that are not finite")
    except Exception as e:  # any error must reach the others, or they would wait for this rank
        error = e
        expected = isinstance(e, (ConfigError, CheckpointError, OSError))
        problem = expected, f"{e if expected else f'{type(e).__name__}: {e}'} (rank {ranks.rank})"
    for expected, text in filter(None, ranks.gather(problem)):
        if not expected:
            raise RuntimeError(f"{path}: {text}") from error
        raise ConfigError(text, KEY)
    # The hashes of what was read; Verification deals the files out.
    reason = Verification(Candidate(0, path, {}, ""), ranks).result() if kind == "titanlite" else None
    if reason:
        raise ConfigError(f"{path} is damaged: {reason}", KEY)


def _resolved(path: Path, family: ModelFamily) -> Path:
    """The directory itself, or the newest checkpoint of a run."""
    try:
        return open_weights(path, family).path
    except (ConfigError, CheckpointError, OSError) as e:
        raise ConfigError(str(e), KEY) from None
