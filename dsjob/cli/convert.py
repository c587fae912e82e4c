"""`dsjob convert`: a checkpoint to plain weights that any tool loads, without loading the model into memory."""

from __future__ import annotations

import argparse
import logging
import sys

from dsjob.checkpoint import convert as conversion


def main(arguments: list[str], debug: bool) -> int:
    """Converts, and says what it wrote."""
    parser = argparse.ArgumentParser(
        prog="dsjob convert", description="Turn a checkpoint into plain weights (safetensors)."
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a run's folder, a checkpoint folder or a step's; a path or URL"
    )
    parser.add_argument(
        "out", nargs="?", metavar="OUT", help="a folder, or a file *.safetensors (the checkpoint folder)"
    )
    parser.add_argument("--to", choices=tuple(conversion.DTYPES), default="fp32", help="dtype of the weights (fp32)")
    parser.add_argument("-t", "--tag", help="the checkpoint to convert (the newest)")
    parser.add_argument("--model", metavar="NAME", help="one of the job's several models (all)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace earlier output")
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    written = conversion.convert(
        args.checkpoint,
        args.out,
        to=args.to,
        tag=args.tag,
        model=args.model,
        max_shard_size=conversion.parse_size(args.max_shard_size),
        overwrite=args.overwrite,
        progress=_show_progress if sys.stderr.isatty() else None,
    )
    for file in written:
        what = f"{file.tensors} tensors" if file.tensors else "index"
        print(f"{file.path}  {file.size:,} bytes  {what}  sha256 {file.sha256}")  # noqa: T201
    files = [file.path for file in written if file.tensors]
    print("\nload with:  from safetensors.torch import load_file")  # noqa: T201
    if len(files) == 1:
        print(f"            model.load_state_dict(load_file({files[0]!r}))")  # noqa: T201
    else:
        print(f"            model.load_state_dict({{k: v for file in {files} for k, v in load_file(file).items()}})")  # noqa: T201
    return 0


def _show_progress(done: int, total: int) -> None:
    print(f"\r{100 * done // max(total, 1):3d}%", end="\r" if done < total else "\r    \r", file=sys.stderr, flush=True)  # noqa: T201
