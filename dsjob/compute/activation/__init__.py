"""Activation checkpointing: `recompute` runs it, `stores` keeps inputs until the backward pass, `rng` has the random
states of model-parallel ranks.

`dsjob/engine/blocks.py` selects the blocks of a model that the document means; DeepSpeed's functions are in
`dsjob/checkpointing.py`.
"""
