"""`deepspeed.module_inject.layers`: linear layers that ranks divide, for models that name them themselves."""

from __future__ import annotations

from typing import Any

import torch.distributed as _dist
from torch import nn as _nn

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.parallel.tensor.styles import Place as _Place
from dsjob.parallel.tensor.styles import colwise as _colwise
from dsjob.parallel.tensor.styles import rowwise as _rowwise
from dsjob.ranks.mesh import Ranks as _Ranks

_mode = {"training": False}


def set_autotp_mode(training: bool = False) -> None:
    """Has no effect: `initialize` divides layers if the config says so."""
    _mode["training"] = training


def is_autotp_training_mode() -> bool:
    """What `set_autotp_mode` was called with last."""
    return _mode["training"]


class _DividedLinear(_nn.Linear):
    """A linear layer of which each rank of a group holds a part. Takes the parameters of `module`, and cuts them."""

    def __init__(self, module: _nn.Linear, mp_group: _dist.ProcessGroup | None, *, name: str | None) -> None:
        _nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        self.weight, self.bias = module.weight, module.bias
        self.name = name
        ranks = _Ranks(_dist.get_rank(mp_group), _dist.get_world_size(mp_group), mp_group) if mp_group else _Ranks()
        self._place = _Place(name or "linear", ranks, None)


class LinearLayer(_DividedLinear):
    """Divides the outputs. gather_output: whether each rank gets all of them."""

    def __init__(
        self,
        module: _nn.Linear,
        mp_group: _dist.ProcessGroup | None = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        name: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__(module, mp_group, name=name)
        self.gather_output = gather_output
        if not skip_partition and self._place.ranks.size > 1:
            _colwise(self, self._place, gathers=gather_output)


class LinearAllreduce(_DividedLinear):
    """Divides the inputs, which are already this rank's part, and adds up the ranks' outputs."""

    def __init__(
        self, module: _nn.Linear, mp_group: _dist.ProcessGroup | None = None, name: str | None = None, **_: Any
    ) -> None:
        super().__init__(module, mp_group, name=name)
        if self._place.ranks.size > 1:
            _rowwise(self, self._place)


__getattr__ = _explain_names(__name__)
