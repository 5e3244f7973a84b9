"""`titanlite import SRC DIR CONFIG.toml`: convert weights of torchtitan (a DCP step folder) or of Meta
(consolidated.*.pth) to a Hugging Face directory, which `checkpoint.initial_load_path` and transformers read.
[model] and [tokenizer] of CONFIG.toml describe the model and its tokenizer. SRC may be in any format that
initial_load_path reads."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.checkpoint.digest import gib
from titanlite.commands import parser
from titanlite.fetch import check_target, local_copy, new_target
from titanlite.interop.dcp import check_hashes
from titanlite.interop.export import DTYPES, MAX_SHARD_BYTES, ExportFormat, write_directory
from titanlite.interop.formats import open_weights
from titanlite.interop.huggingface import warn_of_generation_settings
from titanlite.interop.initial import TO_CHANGE_IT
from titanlite.interop.weights import ModelAndTokenizer, check_tokenizer
from titanlite.job import build_tokenizer, load_job
from titanlite.log import set_up_logging, tell


def main(argv: Sequence[str]) -> int:
    """Write the directory and print its path."""
    options, overrides = parser("import").read_known(argv)
    set_up_logging(rank=0, verbose=False)
    check_target(options.target, "DIR")
    job = load_job(options.config, overrides, None, options.allow_imports)
    weights = open_weights(local_copy(options.source), job.model, check_base=True)
    if weights.kind == "titanlite":
        check_hashes(weights.path)
    tokenizer = build_tokenizer(job, weights.path)
    check_tokenizer(weights, tokenizer, TO_CHANGE_IT)
    tell(f"using {weights.path}")
    form = ExportFormat(
        DTYPES.get(options.dtype), options.max_shard_size or MAX_SHARD_BYTES, keep_padding=True
    )
    with new_target(options.target) as target:
        size = write_directory(weights, target, ModelAndTokenizer(job.model, tokenizer), form)
    warn_of_generation_settings(weights, tokenizer)
    print(f"{options.target}: {job.model.title} from {weights.path} ({weights.kind}), {gib(size)}")
    return 0
