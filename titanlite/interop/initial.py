"""`checkpoint.initial_load_path`: the weights that a new run starts from, in any supported format.

Names and shapes are checked before the run writes anything. After that each rank reads its own shards.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.resume import Candidate, Verification
from titanlite.checkpoint.state import listed, model_tensors, non_finite
from titanlite.config.component import ConfigError
from titanlite.files import if_on_hub
from titanlite.interop.dcp import open_titanlite
from titanlite.interop.huggingface import (
    is_adapter,
    is_hugging_face,
    open_hugging_face,
    warn_of_generation_settings,
)
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
TO_CHANGE_IT = "to change the tokenizer, start from a directory made by `titanlite export`"


def open_weights(path: Path, family: ModelFamily) -> Weights:
    """Open the weights in a directory of any supported format, for the model `family`. Raises ConfigError or
    CheckpointError if they cannot be read."""
    if path.is_file():
        raise ConfigError(f"{path} is a file; give its directory: {path.parent}")
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory{if_on_hub(path)}")
    if is_adapter(path):
        raise ConfigError(
            f"{path} is a PEFT adapter, not a whole model; merge it into its base model (peft: "
            "merge_and_unload, then save_pretrained) and give that directory"
        )
    if is_hugging_face(path):
        return open_hugging_face(path, family)
    if is_meta(path):
        return open_meta(path, family)
    if is_foreign_dcp(path):
        return open_torchtitan(path, family)
    if steps := [step for _, step in commit.list_committed(path) if is_foreign_dcp(step)]:
        raise ConfigError(f"{path} has checkpoints of another program; give one, such as {steps[-1]}")
    if pickles := sorted(path.glob("pytorch_model*.bin")):
        raise ConfigError(f"{pickles[0]}: pickled weights are not supported; save them as safetensors")
    return open_titanlite(path, family)


def check_initial(path: Path, model: ModelAndTokenizer) -> None:
    """Raise ConfigError unless the weights at `path` fit the model and tokenizer. Called on one rank."""
    family = model.family
    try:
        weights = open_weights(path, family)
        check(weights, family)
        check_tokenizer(weights, model.tokenizer, TO_CHANGE_IT)
        warn_of_generation_settings(weights, model.tokenizer)
    except (ConfigError, CheckpointError, OSError) as e:
        raise ConfigError(str(e), KEY) from None
    net = family.build_on_meta()
    num_rows = min(weights.tensors[name].shape[0] for name in vocabulary_of(net))
    if num_rows < net.vocab_size:
        logger.info(
            f"embedding and head in {path} have {num_rows} rows; the model's remaining "
            f"{net.vocab_size - num_rows} rows are initialised as in a new model"
        )


def load_initial(path: Path, family: ModelFamily, net: nn.Module, ranks: Ranks) -> None:
    """Read each rank's shards of the weights into `net`. Collective; an error of one rank is raised on all
    ranks."""
    # One rank decides: a run that is still training may save another step meanwhile.
    path = ranks.from_rank_zero(lambda: _resolved(path, family))
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
    except Exception as e:  # every error must reach the other ranks, which wait for this one
        error = e
        expected = isinstance(e, (ConfigError, CheckpointError, OSError))
        problem = expected, f"{e if expected else f'{type(e).__name__}: {e}'} (rank {ranks.rank})"
    for expected, text in filter(None, ranks.gather(problem)):
        if not expected:
            raise RuntimeError(f"{path}: {text}") from error
        raise ConfigError(text, KEY)
    # Verification distributes the files over the ranks.
    reason = Verification(Candidate(0, path, {}, ""), ranks).result() if kind == "titanlite" else None
    if reason:
        raise ConfigError(f"{path} is damaged: {reason}", KEY)


def _resolved(path: Path, family: ModelFamily) -> Path:
    """Return `path`, or the newest checkpoint if `path` is a run folder."""
    try:
        return open_weights(path, family).path
    except (ConfigError, CheckpointError, OSError) as e:
        raise ConfigError(str(e), KEY) from None
