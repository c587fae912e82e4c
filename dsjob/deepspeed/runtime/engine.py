"""`deepspeed.runtime.engine`."""

from dsjob.engine.engine import Engine

DeepSpeedEngine = Engine
