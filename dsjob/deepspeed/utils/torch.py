"""`deepspeed.utils.torch`."""

from __future__ import annotations

import torch

from dsjob.deepspeed.absent import explain_names as _explain_names


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether the version of torch is within these bounds, both included. Only major and minor are compared."""

    def parse(version: float | str) -> tuple[int, int]:
        major, _, rest = str(version).partition(".")
        return int(major), int(rest.partition(".")[0] or 0)

    own = parse(torch.__version__)
    return (min_version is None or own >= parse(min_version)) and (max_version is None or own <= parse(max_version))


__getattr__ = _explain_names(__name__)
