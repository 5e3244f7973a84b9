"""`[checkpoint]`: saving, resuming and initial weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from titanlite.config.amount import Interval, MultipleOfInterval
from titanlite.config.component import ConfigError, check_at_least
from titanlite.config.paths import PathText, UrlText


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming. A run resumes from the newest usable checkpoint in its folder."""

    enable: bool = True
    """Save checkpoints and resume from them."""
    folder: PathText = "checkpoint"
    """Folder below job.dump_folder."""
    interval: Interval = 500
    """Steps between saves; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "async"
    """`async`: training continues while a copy in host memory, as large as the rank's state, is written.
    `disabled`: training waits."""
    keep_latest_k: int = 10
    """Newest checkpoints to keep; 0: all. Two healthy checkpoints, the one resumed from, and any with a file
    `step-N.keep` beside it stay, too."""
    keep_every_n_steps: MultipleOfInterval = 0
    """Also keep steps that are multiples of this; 0: none."""
    memory_interval: int = 0
    """Steps between copies of the state in the memory of the node and of the next node, from which the run
    resumes after a failure (docs/checkpoint.md). -1: each copy is followed by a pause three times as long as
    it took. 0: none."""
    load_step: int = -1
    """Step to go back to, once: the next start with the same value resumes from the newest checkpoint since.
    Later checkpoints move to `archived-<n>/`. -1: the newest."""
    restart: bool = False
    """Start at step 1 in a folder with a run, once, as with load_step. Checkpoints move to `archived-<n>/`,
    metrics to `*.superseded.*`."""
    initial_load_path: UrlText = ""
    """Weights of a new run: a Hugging Face model, a titanlite checkpoint or run, a torchtitan DCP checkpoint,
    or Meta's `consolidated.*.pth`. A resume reads it only with adapters ([lora])."""
    allow_changed: list[str] = field(default_factory=list)
    """Keys of the run identity that may differ on resume, such as `["model.rope_theta"]`, or `"optimizer"`
    (docs/checkpoint.md). A new run refuses unknown names, a resumed run warns of them."""

    def __post_init__(self) -> None:
        folder = Path(self.folder)
        if folder.is_absolute() or ".." in folder.parts or folder == Path():
            raise ConfigError(f"{self.folder!r} is not a folder below job.dump_folder", "folder")
        if self.interval < 1:
            raise ConfigError(f"{self.interval} is below 1; use enable = false to save nothing", "interval")
        if self.keep_latest_k < 0 or self.keep_latest_k == 1:
            raise ConfigError(
                "keep 2 or more, or 0 for all: with 1, one bad checkpoint would lose the run", "keep_latest_k"
            )
        check_at_least(self, 0, "keep_every_n_steps")
        check_at_least(self, -1, "memory_interval")
        if self.load_step < 1 and self.load_step != -1:
            raise ConfigError(
                f"{self.load_step} is neither -1 nor a step; to begin again at step 1, set restart = true or "
                "choose another --job.dump_folder",
                "load_step",
            )
        if self.restart and self.load_step != -1:
            raise ConfigError(f"load_step = {self.load_step} goes back to a checkpoint: unset one", "restart")
        if self.restart and not self.enable:
            raise ConfigError("enable = false saves no checkpoints: choose another folder", "restart")
