"""`[checkpoint]`: the keys of saving, resuming, and of what comes from and goes to other programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from titanlite.config.component import ConfigError

EXPORTS = "hf"  # in the run folder


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming. A run resumes by itself from the newest good checkpoint in its folder."""

    enable: bool = True
    """Save checkpoints and resume from them."""
    folder: str = "checkpoint"
    """Where, under job.dump_folder."""
    interval: int = 500
    """Steps between saves; the last step is always saved."""
    async_mode: Literal["disabled", "async"] = "async"
    """`async`: training goes on while the checkpoint is copied to host memory and written. Needs as much host
    memory as a rank has state. The files are the same."""
    keep_latest_k: int = 10
    """Checkpoints to keep, the newest ones; 0: all. Also kept: the one resumed from, and any with an empty
    file `step-N.keep` beside it."""
    keep_every_n_steps: int = 0
    """Also keep those whose step is a multiple of this; 0: none."""
    load_step: int = -1
    """-1: the newest. Else go back to this step: later checkpoints, and exports, are moved to
    `archived-<n>/`, once; a restart with the same value goes on from the newest one saved since."""
    restart: bool = False
    """Begin a new run at step 1 in a folder that holds another: its checkpoints and exports are moved to
    `archived-<n>/`, its metrics to `*.superseded.*`, once; a start with the same arguments goes on from the
    newest checkpoint saved since."""
    verify: Literal["full", "sizes", "off"] = "full"
    """What is checked of a checkpoint that is loaded: `full`: SHA-256 of all files; `sizes`: of the small
    files, and that the shards are there with their sizes; `off`: of the small files. A load that fails is
    followed by `full`."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """After a failed save (a full disk, say): `continue` trains on and stops at the third failure in a row;
    `stop` stops at once."""
    initial_load_path: str = ""
    """A directory with the weights that a new run starts from: Hugging Face's, a titanlite checkpoint or run
    (its weights alone), a torchtitan DCP checkpoint, or Meta's `consolidated.*.pth`. Not used by a run that
    resumes."""
    export_hf: bool = False
    """At the end of the run also write the model as a Hugging Face directory, `hf/step-N` under
    job.dump_folder."""
    export_hf_interval: int = 0
    """Steps between such exports, a multiple of `interval`. They are made from the checkpoint while training
    goes on, and a checkpoint is kept until its export is made; the next start makes those that a killed or
    stopped run has not. 0: only at the end."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """The dtype of exported weights."""
    allow_changed: list[str] = field(default_factory=list)
    """Keys of the recipe that may differ on resume, for example `["model.rope_theta"]`; any other difference
    is refused, and so is one that would train on sequences of the epoch again or leave some out. A new run
    refuses a name that its recipe does not have."""

    def __post_init__(self) -> None:
        folder = Path(self.folder)
        if folder.is_absolute() or ".." in folder.parts or folder == Path():
            raise ConfigError(f"{self.folder!r} is not a folder below job.dump_folder", "folder")
        if self.interval < 1:
            raise ConfigError(f"{self.interval} is below 1; use enable = false to save nothing", "interval")
        if self.keep_latest_k < 0 or self.keep_latest_k == 1:
            raise ConfigError(
                "keep 2 or more, or 0 for all: with 1, one bad checkpoint would be the run", "keep_latest_k"
            )
        if self.keep_every_n_steps < 0:
            raise ConfigError(f"{self.keep_every_n_steps} is below 0", "keep_every_n_steps")
        if self.export_hf_interval < 0 or self.export_hf_interval % self.interval:
            raise ConfigError(
                f"{self.export_hf_interval} is no multiple of interval = {self.interval}: exports are made "
                "from checkpoints",
                "export_hf_interval",
            )
        if self.export_hf_interval and not self.export_hf:
            raise ConfigError("without export_hf = true nothing is exported", "export_hf_interval")
        if self.export_hf and folder.parts[0] == EXPORTS:
            raise ConfigError(f"{EXPORTS} is where exports go; name another folder", "folder")
        if self.export_hf and not self.enable:
            raise ConfigError("exports are made from checkpoints, and enable = false saves none", "export_hf")
        if self.load_step < 1 and self.load_step != -1:
            raise ConfigError(
                f"{self.load_step} is neither -1 nor a step; to begin again at step 1, set restart = true or "
                "choose another --job.dump_folder",
                "load_step",
            )
        if self.restart and self.load_step != -1:
            raise ConfigError(f"load_step = {self.load_step} goes back to a checkpoint: unset one", "restart")
        if self.restart and not self.enable:
            raise ConfigError("enable = false saves nothing to go on from: choose another folder", "restart")
