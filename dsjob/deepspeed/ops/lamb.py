"""`deepspeed.ops.lamb`: LAMB with DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.absent import stand_for as _stand_for
from dsjob.deepspeed.defaults import fill_params
from dsjob.optim.lamb import Lamb


class FusedLamb(Lamb):
    """LAMB, with the arguments of `optimizer.params` for type Lamb."""

    def __init__(self, params: Iterable[Any], **given: Any) -> None:
        filled = fill_params("optimizer", "Lamb", given)
        super().__init__(params, **{key: value for key, value in filled.items() if key != "amsgrad"})


__path__ = _stand_for(__name__, "fused_lamb")
__getattr__ = _explain_names(__name__)
