"""`dsjob convert`: converts a checkpoint to plain weights that any tool loads, without holding the model in memory."""

from __future__ import annotations

import argparse
import json
import logging
import os
from typing import Any

from dsjob.checkpoint.format import zero_to_fp32 as plain
from dsjob.checkpoint.format.rounding import DTYPES
from dsjob.checkpoint.offline import convert as conversion
from dsjob.cli.bar import show_progress
from dsjob.cli.flags import add_choice, make_parser
from dsjob.errors import UsageError
from dsjob.front.weights import convert
from dsjob.terminal import print_lines, split_text


def main(arguments: list[str], debug: bool) -> int:
    """Converts a checkpoint, and prints the files written and how to load them."""
    args = _parse(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    conversion.logger.setLevel(logging.INFO)
    hf = args.to == "hf"
    _require_fitting(args)
    with show_progress("converting") as progress:
        written = convert(
            args.checkpoint,
            args.out,
            to=args.to,
            dtype=args.dtype,
            tag=args.tag,
            best=args.best,
            model=args.model,
            ema=args.ema,
            form=args.format,
            max_shard_size=args.max_shard_size,
            overwrite=args.overwrite,
            strip=args.strip,
            prefix=args.prefix,
            exclude_frozen=args.exclude_frozen,
            tokenizer=args.tokenizer,
            merge=args.merge,
            adapter=args.adapter,
            adapter_config=args.adapter_config,
            zero_stage=args.zero_stage,
            world_size=args.world_size,
            progress=progress,
        )
    if args.to == "deepspeed":
        _show_deepspeed(written, args.out)
    else:
        _show(written, hf)
    return 0


class _Formatter(logging.Formatter):
    """Notes name tensors and files of the checkpoint."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(split_text(super().format(record)))


def _require_fitting(args: argparse.Namespace) -> None:
    """Raises UsageError for flags that do not fit the value of --to, and for missing ones."""
    if args.to == "deepspeed":
        _require_deepspeed(args)
        return
    if args.zero_stage or args.world_size:
        raise UsageError("--zero-stage and --world-size require --to deepspeed", hint="leave them out")
    hf = args.to == "hf"
    if not hf and (args.dtype or args.tokenizer):
        raise UsageError(
            "--dtype and --tokenizer require --to hf or deepspeed", hint="--to fp32, bf16 or fp16 sets the dtype"
        )
    given = [name for name in ("merge", "adapter", "adapter_config") if getattr(args, name)]
    if given and not hf:
        raise UsageError(f"--{given[0].replace('_', '-')} requires --to hf", hint="--to fp32 writes all tensors")
    if hf and not args.out:
        raise UsageError("--to hf needs a folder to write to", hint="dsjob convert --to hf CKPT FOLDER")
    if hf and (args.strip or args.prefix):
        raise UsageError("--to hf keeps the names that transformers expects", hint="leave --prefix and --strip out")


def _require_deepspeed(args: argparse.Namespace) -> None:
    if args.out is None or args.zero_stage is None or args.world_size is None or args.world_size < 1:
        raise UsageError("--to deepspeed needs OUT, --zero-stage 1, 2 or 3, and --world-size N, at least 1")
    weights = ("model", "ema", "strip", "prefix", "exclude_frozen", "format")
    other = (*weights, "tokenizer", "merge", "adapter", "adapter_config")
    given = [f"--{name.replace('_', '-')}" for name in other if getattr(args, name)]
    if given:
        hint = "leave it out: DeepSpeed resumes the full state"
        raise UsageError(f"{', '.join(given)} is not available with --to deepspeed", hint=hint)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(
        "convert",
        "Convert a checkpoint to plain weights, to a folder for transformers, or to a DeepSpeed checkpoint.",
        (
            "dsjob convert runs/a",
            "dsjob convert --best --to bf16 runs/a weights.safetensors",
            "dsjob convert --to hf runs/a/checkpoints model",
            "dsjob convert --to deepspeed runs/a ds --zero-stage 3 --world-size 8",
        ),
    )

    def add(*names: str, **options: Any) -> None:
        parser.add_argument(*names, **options)

    add(
        "checkpoint",
        metavar="CKPT",
        help="a run's folder, a folder of checkpoints, or a single checkpoint; a path or URL",
    )
    out = "what to write: a folder, or a file whose name ends in .safetensors, .bin, .pt, .pth or .ckpt (default: the "
    out += "folder weights-TAG-DTYPE next to CKPT; --to hf and deepspeed need OUT)"
    add("out", nargs="?", metavar="OUT", help=out)
    to = "fp32 (default), bf16, fp16: plain weights of this dtype; hf: a folder that transformers' from_pretrained "
    to += "loads; deepspeed: a DeepSpeed checkpoint"
    add("--to", choices=(*DTYPES, "hf", "deepspeed"), default="fp32", help=to)
    form = "format of the files in a folder (default: safetensors)"
    add("--format", choices=("safetensors", "torch"), default="", help=form)
    add_choice(parser, " to convert")
    add("--model", metavar="NAME", help="convert only one of the job's models (default: all)")
    add("--ema", action="store_true", help="convert averages of weights (dsjob.callbacks.EMA) instead of the weights")
    add("--strip", default="", metavar="TEXT", help="remove this prefix from names, for example module.")
    add("--prefix", default="", metavar="TEXT", help="add this prefix to names")
    add("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")
    dtype = (
        "with --to hf: dtype of the weights (default: fp32); with --to deepspeed: compute dtype (default: the job's)"
    )
    add("--dtype", choices=tuple(DTYPES), help=dtype)
    tokenizer = (
        "with --to hf: copy a tokenizer's files from this folder (default: the one beside the checkpoint, or the job's)"
    )
    add("--tokenizer", metavar="FOLDER", help=tokenizer)
    add("--merge", action="store_true", help="with --to hf: merge a LoRA adapter into the weights")
    add("--adapter", metavar="NAME", help="with --to hf: which of several adapters to write")
    config = "with --to hf: the adapter_config.json, for checkpoints that do not contain one"
    add("--adapter-config", metavar="FILE", help=config)
    add("--zero-stage", type=int, choices=(1, 2, 3), help="with --to deepspeed: ZeRO stage of the checkpoint")
    add("--world-size", type=int, metavar="N", help="with --to deepspeed: number of ranks that will load it")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a file (default: 5GB)")
    add("--overwrite", action="store_true", help="replace earlier output of the same kind")
    return parser.parse_intermixed_args(arguments)


def _show_deepspeed(written: list[plain.Written], out: str) -> None:
    for file in written:
        print_lines(file.path)
    print_lines("", "These files are pickles, the only format that DeepSpeed loads.")
    print_lines(f"load with:  engine.load_checkpoint({out!r})")


def _name_class(folder: str) -> str:
    """The class that loads the whole converted model; AutoModel would drop its head."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        names = json.load(file).get("architectures")
    named = isinstance(names, list) and len(names) == 1 and str(names[0]).isidentifier()
    return str(names[0]) if named else "transformers.AutoModel"


def _show(written: list[plain.Written], hf: bool) -> None:
    for file in written:
        what = f"  {file.tensors} tensors" if file.tensors else ""
        print_lines(f"{file.path}  {file.size:,} bytes{what}  sha256 {file.sha256}")
    files = [file.path for file in written if file.tensors]
    if hf:
        folder, _, name = files[0].rpartition("/")
        if name.startswith("adapter_model"):
            print_lines("", f"load with:  peft.PeftModel.from_pretrained(base_model, {folder!r})")
            return
        print_lines("", f"load with:  {_name_class(folder)}.from_pretrained({folder!r})")
        return
    torch = files[0].endswith(plain.TORCH)
    load = "torch.load({}, weights_only=True)" if torch else "load_file({})"
    print_lines("", f"load with:  {'import torch' if torch else 'from safetensors.torch import load_file'}")
    state = f"{{k: v for file in {files} for k, v in {load.format('file')}.items()}}"
    print_lines(f"            model.load_state_dict({state if files[1:] else load.format(repr(files[0]))})")
