"""`deepspeed.checkpoint.ds_to_universal`: the script that programs run before they train on another number of ranks.

dsjob's checkpoints load on any number of ranks as they are. The script copies one under another tag, so that programs
that go on with the result find it.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from dsjob.checkpoint.offline.transfer import copy
from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.errors import DsjobError, UsageError


def parse_arguments() -> argparse.Namespace:
    """The arguments of DeepSpeed's script. Only the two folders have an effect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_folder", required=True, help="folder of the checkpoints, and tag: FOLDER/TAG")
    parser.add_argument("--output_folder", required=True, help="the same for the copy")
    for name in ("num_extract_workers", "num_merge_workers"):
        parser.add_argument(f"--{name}", type=int, help="has no effect")
    for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
        parser.add_argument(f"--{name}", action="store_true", help="has no effect")
    return parser.parse_args()


def main(args: Any) -> None:
    """Copies the checkpoint `args.input_folder` to `args.output_folder`. Raises UsageError, CheckpointError,
    StorageError."""
    source, tag = os.path.split(os.fspath(args.input_folder).rstrip("/"))
    target, new_tag = os.path.split(os.fspath(args.output_folder).rstrip("/"))
    if (os.path.abspath(source), tag) == (os.path.abspath(target), new_tag):
        raise UsageError(f"input and output are the same folder: {args.input_folder}", hint="name another folder")
    copy(source or ".", target or ".", tag=tag, new_tag=new_tag)


__getattr__ = _explain_names(__name__)

if __name__ == "__main__":
    try:
        main(parse_arguments())
    except DsjobError as error:
        sys.exit(f"dsjob: error: {error}")
