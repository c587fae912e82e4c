"""`deepspeed.elasticity`: batch sizes for a number of ranks that changes between runs."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.deepspeed.elasticity import config as config
from dsjob.deepspeed.elasticity.config import ElasticityConfig as ElasticityConfig
from dsjob.deepspeed.elasticity.config import ElasticityConfigError as ElasticityConfigError
from dsjob.deepspeed.elasticity.config import ElasticityError as ElasticityError
from dsjob.deepspeed.elasticity.config import ElasticityIncompatibleWorldSize as ElasticityIncompatibleWorldSize
from dsjob.deepspeed.elasticity.elasticity import compute_elastic_config as compute_elastic_config
from dsjob.deepspeed.elasticity.elasticity import elasticity_enabled as elasticity_enabled

__getattr__ = _explain_names(__name__)
