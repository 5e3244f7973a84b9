"""`checkpoint.initial_load_path`: the weights that a new run starts from, in any supported format.

Names and shapes are checked before the run writes anything. After that each rank reads its own shards.
"""

from __future__ import annotations

import operator
from pathlib import Path

from torch import nn

from titanlite.checkpoint import commit
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.resume import Verification
from titanlite.checkpoint.state import BaseModel, listed, model_tensors, non_finite
from titanlite.config.component import ConfigError
from titanlite.interop.formats import NOT_THE_BASE, digests, fingerprint, locate_base, open_weights
from titanlite.interop.huggingface import warn_of_generation_settings
from titanlite.interop.weights import (
    ModelAndTokenizer,
    check,
    check_tokenizer,
    load_weights,
    vocabulary_of,
)
from titanlite.log import logger
from titanlite.models.base import ModelFamily
from titanlite.ranks import Ranks

KEY = "checkpoint.initial_load_path"
TO_CHANGE_IT = "to change the tokenizer, start from a directory made by `titanlite export`"


def check_initial(path: Path, model: ModelAndTokenizer, is_base: bool = False) -> None:
    """Raise ConfigError unless the weights at `path` fit the model and tokenizer. `is_base`: they are the
    base model of adapters, which has to be whole. Called on one rank."""
    family = model.family
    try:
        weights = open_weights(path, family, check_base=True)
        check(weights, family)
        check_tokenizer(weights, model.tokenizer, TO_CHANGE_IT)
        warn_of_generation_settings(weights, model.tokenizer)
    except (ConfigError, CheckpointError, OSError) as e:
        raise ConfigError(str(e), KEY) from None
    if is_base and weights.merged:
        raise ConfigError(
            f"{path} is itself a checkpoint of adapters: make a whole model of it with `titanlite export "
            "--dtype=float32`, and give that directory",
            KEY,
        )
    net = family.build_on_meta()
    num_rows = min(weights.tensors[name].shape[0] for name in vocabulary_of(net))
    if is_base and num_rows < net.vocab_size:
        raise ConfigError(
            f"embedding and head in {path} have {num_rows} rows, the model {net.vocab_size}, and the base "
            f"model of adapters cannot have rows that are not in its files: set "
            f"model.overrides.vocab_size = {num_rows}",
            KEY,
        )
    if num_rows < net.vocab_size:
        logger.info(
            f"embedding and head in {path} have {num_rows} rows; the model's remaining "
            f"{net.vocab_size - num_rows} rows are initialised as in a new model"
        )


def load_initial(path: Path, family: ModelFamily, net: nn.Module, ranks: Ranks) -> None:
    """Read each rank's shards of the weights into `net`. Collective; an error of one rank is raised on all
    ranks."""
    # One rank decides: a run that is still training may save another step meanwhile.
    _load(ranks.from_rank_zero(lambda: _resolved(path, family)), family, net, ranks)


def load_base(
    path: Path, family: ModelFamily, net: nn.Module, ranks: Ranks, recorded: BaseModel | None
) -> BaseModel:
    """Read the base model of adapters as load_initial does, and return what identifies it; the ranks hash its
    weights together. Adapters of `net` keep their values. `recorded`: the base model of the run that is
    resumed. Raises ConfigError if it had other weights. Collective."""
    path = ranks.from_rank_zero(lambda: _resolved(locate_base(path, recorded), family).resolve())
    if commit.step_of(path) is not None and not commit.is_kept(path):
        logger.info(f"the adapters need {path} for good: `touch {path}.keep` keeps its run from deleting it")
    # The fingerprint also finds damage, so a resume need not read the files, with optimizer state, once more.
    own = _load(path, family, net, ranks, is_base=True, verify=recorded is None)
    sha256 = fingerprint(ranks.all_reduce(own, operator.or_))
    if recorded is not None and sha256 != recorded.sha256:
        raise ConfigError(
            f"{NOT_THE_BASE.format(path, 'the adapters of this run', recorded.path)}: undo the change, name "
            "the directory that has them, or start a new run in another --job.dump_folder",
            KEY,
        )
    return BaseModel(str(path), sha256)


def _load(
    path: Path,
    family: ModelFamily,
    net: nn.Module,
    ranks: Ranks,
    is_base: bool = False,
    verify: bool = True,
) -> dict[str, str]:
    """Read each rank's shards of the weights at `path`, which is resolved, into `net`. Returns the digests of
    this rank's share of the tensors if these are the base model of adapters, otherwise none. `verify`: hash
    the files of a titanlite checkpoint. Collective."""
    problem: Exception | None = None
    kind, own = "", dict[str, str]()
    try:
        weights = open_weights(path, family)
        kind = weights.kind
        logger.info(f"reading the initial weights from {path} ({kind})")
        load_weights(weights, net)
        own = digests(weights, ranks.rank, ranks.size) if is_base else own
        if names := non_finite({"model": model_tensors(net)}):
            raise ConfigError(f"{path}: {listed(names)} has values that are not finite")
    except Exception as e:  # every error must reach the other ranks, which wait for this one
        problem = ConfigError(f"{e} (rank {ranks.rank})", KEY)
        if not isinstance(e, (ConfigError, CheckpointError, OSError)):
            problem = RuntimeError(f"{path}: {type(e).__name__}: {e} (rank {ranks.rank})")
            problem.__cause__ = e
    if first := ranks.first(problem):
        raise first from problem and problem.__cause__  # other ranks' errors come without their cause
    # Verification distributes the files over the ranks.
    is_hashed = verify and kind == "titanlite"
    reason = Verification(path, commit.read_manifest(path), ranks).result() if is_hashed else None
    if reason:
        raise ConfigError(str(commit.damaged(path, reason)), KEY)
    return own


def _resolved(path: Path, family: ModelFamily) -> Path:
    """Return `path`, or the newest checkpoint if `path` is a run folder."""
    try:
        return open_weights(path, family).path
    except (ConfigError, CheckpointError, OSError) as e:
        raise ConfigError(str(e), KEY) from None
