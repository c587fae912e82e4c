"""Bringing what people have: DeepSpeed configs, Trainer arguments, launch commands and accelerate files, into one job.

`sources` reads and recognises files, one module a source maps what they say to keys of the job document, `settle`
joins it all. Values keep their places throughout. Nothing that a source names is imported.
"""
