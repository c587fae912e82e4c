"""`deepspeed.runtime.config`."""

from dsjob.errors import ConfigError

DeepSpeedConfigError = ConfigError
ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
