"""Checkpoints: their format, the root folder, saving and loading, and tools that need no running job."""
