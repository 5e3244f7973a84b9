"""`titanlite import SRC DIR CONFIG.toml`: weights of torchtitan (a DCP step folder) or of Meta
(consolidated.*.pth) as a Hugging Face directory. That is the form in which titanlite exchanges weights:
`checkpoint.initial_load_path` takes it, and so does transformers. CONFIG.toml says what the model and the
tokenizer are, in [model] and [tokenizer]; sources of other kinds that initial_load_path reads are taken,
too."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.checkpoint.digest import gib
from titanlite.commands import parser
from titanlite.config.paths import check_new
from titanlite.interop.dcp import check_hashes
from titanlite.interop.export import DTYPES, write_directory
from titanlite.interop.huggingface import warn_of_generation_settings
from titanlite.interop.initial import TO_CHANGE_IT, open_weights
from titanlite.interop.weights import ModelAndTokenizer, check_tokenizer
from titanlite.job import load_job
from titanlite.log import set_up_logging, tell
from titanlite.tools.export import parse_size


def main(argv: Sequence[str]) -> int:
    """Write the directory and say where it is."""
    options, overrides = parser("import").read_known(argv)
    size_limit = parse_size(options.max_shard_size)
    set_up_logging(rank=0, verbose=False)
    check_new(options.target, "DIR")
    job = load_job(options.config, overrides, None, options.allow_imports)
    weights = open_weights(options.source, job.model)
    if weights.kind == "titanlite":
        check_hashes(weights.path)
    exchange = ModelAndTokenizer(job.model, job.tokenizer.build())
    check_tokenizer(weights, exchange.tokenizer, TO_CHANGE_IT)
    tell(f"using {weights.path}")
    size = write_directory(
        weights, options.target, exchange, DTYPES.get(options.dtype), size_limit, keep_padding=True
    )
    warn_of_generation_settings(weights, exchange.tokenizer)
    model = f"{job.model.name} {job.model.flavor}"
    print(f"{options.target}: {model} from {weights.path} ({weights.kind}), {gib(size)}")
    return 0
