"""Optimizers and learning-rate schedules, by the names that a job document uses."""

from dsjob.optim.optimizers import build_optimizer as build_optimizer
from dsjob.optim.schedules import build_scheduler as build_scheduler
