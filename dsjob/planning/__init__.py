"""Predicts what a job needs: memory, communication and checkpoint sizes, in bytes. Pure arithmetic, without torch.

Inputs that must be measured (the model's shapes, the tensors that autograd keeps, the optimizer's state, the schedule)
come from `dsjob.training.probe`.
"""
