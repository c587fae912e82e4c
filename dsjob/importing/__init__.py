"""Converts DeepSpeed configs, Trainer arguments, launch commands, accelerate files and experiments of Determined to one
job document.

`sources` reads files and detects their types, one module per source maps values to keys of the job document, and
`settle` merges everything. Values keep their places (file and line) throughout. Nothing that a source names is
imported.
"""
