"""Callbacks: the base class of those that jobs name, and ready-made ones."""

from dsjob.callbacks.callback import Callback as Callback
from dsjob.callbacks.callback import RunView as RunView
from dsjob.callbacks.early_stopping import EarlyStopping as EarlyStopping
from dsjob.callbacks.ema import EMA as EMA
from dsjob.callbacks.nan_guard import NanGuard as NanGuard
from dsjob.callbacks.stop_after import StopAfter as StopAfter
