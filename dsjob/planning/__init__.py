"""What a job needs, by arithmetic alone: bytes of memory, of communication and of checkpoints. Without torch.

What has to be looked at instead (the model's shapes, what autograd keeps, the optimizer's state, the schedule) comes
from `dsjob.training.probe`.
"""
