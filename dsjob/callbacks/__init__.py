"""Callbacks: the base class of those that jobs name, and ready-made ones."""

from dsjob.callbacks.callback import Callback as Callback
from dsjob.callbacks.callback import RunView as RunView
from dsjob.callbacks.early_stopping import EarlyStopping as EarlyStopping
from dsjob.callbacks.ema import EMA as EMA
from dsjob.callbacks.flops import Flops as Flops
from dsjob.callbacks.gradient_norms import GradientNorms as GradientNorms
from dsjob.callbacks.learning_rates import LearningRates as LearningRates
from dsjob.callbacks.memory_use import MemoryUse as MemoryUse
from dsjob.callbacks.nan_guard import NanGuard as NanGuard
from dsjob.callbacks.profiler import Profiler as Profiler
from dsjob.callbacks.sampled_text import SampledText as SampledText
from dsjob.callbacks.stop_after import StopAfter as StopAfter
from dsjob.callbacks.wall_clock import WallClock as WallClock
