"""Activations computed again in the backward pass: `recompute` does it, `stores` keeps the inputs until then, `rng` the
generators of model-parallel ranks.

Which blocks of a model the document means is for `blocks` to say; DeepSpeed's calls are in `checkpointing`.
"""
