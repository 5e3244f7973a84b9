"""`titanlite import SRC DIR CONFIG.toml`: weights of torchtitan (a DCP step folder) or of Meta
(consolidated.*.pth) as a Hugging Face directory. That is the form in which titanlite exchanges weights:
`checkpoint.initial_load_path` takes it, and so does transformers. CONFIG.toml says what the model and the
tokenizer are, in [model] and [tokenizer]; sources of other kinds that initial_load_path reads are taken,
too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from titanlite.checkpoint.dcp import check_whole
from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.export import DTYPES, write_directory
from titanlite.checkpoint.initial import TO_CHANGE_IT, open_weights
from titanlite.checkpoint.weights import Exchange, check_tokenizer
from titanlite.job import check_writable, load_job
from titanlite.log import set_up_logging
from titanlite.tools.export import add_allow_imports, add_format_options, parse_size


def main(argv: Sequence[str]) -> int:
    """Write the directory and say where it is."""
    parser = argparse.ArgumentParser(
        prog="titanlite import",
        allow_abbrev=False,
        usage="titanlite import SRC DIR CONFIG.toml [--dtype T] [--max-shard-size SIZE] [--a.key=value ...]",
        description=__doc__,
    )
    parser.add_argument("source", type=Path, help="what to read")
    parser.add_argument("target", type=Path, help="the directory to make")
    parser.add_argument("config", type=Path, help="a job's TOML file; keys may be overridden as in `train`")
    add_format_options(parser, default_dtype="as-is")
    add_allow_imports(parser)
    options, overrides = parser.parse_known_args(argv)
    size_limit = parse_size(options.max_shard_size)
    set_up_logging(rank=0, verbose=False)
    check_writable(options.target.parent, "DIR")
    job = load_job(options.config, overrides, None, options.allow_imports)
    weights = open_weights(options.source, job.model)
    if weights.kind == "titanlite":
        check_whole(weights.path)
    exchange = Exchange(job.model, job.tokenizer.build())
    check_tokenizer(weights, exchange.codec, TO_CHANGE_IT)
    size = write_directory(
        weights, options.target, exchange, DTYPES.get(options.dtype), size_limit, keep_padding=True
    )
    model = f"{job.model.name} {job.model.flavor}"
    print(f"{options.target}: {model} from {weights.path} ({weights.kind}), {gib(size)}")
    return 0
