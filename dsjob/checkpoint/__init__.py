"""Checkpoints: their format, what lies in a root, saving and loading, and work on them without a running job."""
