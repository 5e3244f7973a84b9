"""`titanlite export RUN_OR_STEP DIR`: write a checkpoint's model as a Hugging Face directory, which
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` open. Adapters are merged into
their base model or, with --adapter, written in PEFT's format. Runs on the CPU and needs the memory of one
tensor. An export that fails leaves nothing on the disk. DIR may be in a bucket: the directory is made in
$TMPDIR and uploaded, config.json last; the same command completes an upload that was interrupted."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from titanlite.checkpoint.digest import gib
from titanlite.checkpoint.find import find_checkpoint
from titanlite.commands import parser
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import import_own_components
from titanlite.fetch import check_target, local_copy, new_target
from titanlite.interop.dcp import check_hashes, open_titanlite
from titanlite.interop.export import DTYPES, MAX_SHARD_BYTES, ExportFormat, write_adapter, write_directory
from titanlite.interop.formats import WRITERS, Writer, has_adapters, open_base, open_checkpoint
from titanlite.interop.weights import ModelAndTokenizer
from titanlite.job import load_recorded_job, open_recorded_tokenizer
from titanlite.log import set_up_logging, tell

HUGGING_FACE = "huggingface"


def main(argv: Sequence[str]) -> int:
    """Write the directory and print its path."""
    options = parser("export").read(argv)
    set_up_logging(rank=0, verbose=False)
    writer = _writer(options)
    check_target(options.target, "DIR")
    path = find_checkpoint(local_copy(options.path))
    check_hashes(path)
    job = load_recorded_job(path, options.allow_imports)
    job.moe.check_export()
    if options.adapter:
        weights = open_titanlite(path, job.model, options.ema)
        if not has_adapters(weights):
            raise ConfigError(f"{path} has no adapters: leave out --adapter")
        if options.keep_padding:
            raise ConfigError("adapters have no rows of token ids: leave out --keep-padding")
        if options.max_shard_size:
            raise ConfigError("PEFT reads adapters from one file: leave out --max-shard-size")
        if options.base:
            open_base(weights, job.model, path=options.base)  # raises an error for another base model
    else:
        weights = open_checkpoint(path, job.model, options.ema, base_path=options.base)
    tokenizer = open_recorded_tokenizer(job, path, weights.tokenizer)
    tell(f"using {path}")
    max_bytes = options.max_shard_size or MAX_SHARD_BYTES
    form = ExportFormat(DTYPES.get(options.dtype or "bfloat16"), max_bytes, options.keep_padding)
    with new_target(options.target) as target:
        if writer is not None:
            size = writer(weights, target, job.model)
        elif options.adapter:
            size = write_adapter(weights, target, job.model, form.dtype, options.base)
        else:
            size = write_directory(weights, target, ModelAndTokenizer(job.model, tokenizer), form)
    source = f"the average of the weights in {path}" if options.ema else path
    model = f"{'adapters of ' if options.adapter else ''}{job.model.title}"
    print(f"{options.target}: {model} from {source}, {gib(size)}")
    return 0


def _writer(options: Namespace) -> Writer | None:
    """The writer of the format that the options choose; None: Hugging Face's. Raises ConfigError."""
    if options.format == HUGGING_FACE:
        return None
    import_own_components()  # a satellite adds its formats in its module `components`
    if options.format not in WRITERS:
        raise ConfigError(
            f"unknown format {options.format!r}{suggest(options.format, [HUGGING_FACE, *WRITERS])}",
            "--format",
        )
    if options.adapter:
        raise ConfigError(f"--format={options.format} cannot write adapters", "--adapter")
    if options.dtype not in (None, "float32"):
        raise ConfigError(f"--format={options.format} writes float32 only", "--dtype")
    for option in ("keep_padding", "max_shard_size"):
        if getattr(options, option):
            raise ConfigError(
                f"--format={options.format} has no such choice", f"--{option.replace('_', '-')}"
            )
    return WRITERS[options.format]
