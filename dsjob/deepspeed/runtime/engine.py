"""`deepspeed.runtime.engine`."""

from dsjob.engine import Engine

DeepSpeedEngine = Engine
