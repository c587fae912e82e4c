"""Reads and writes DeepSpeed's checkpoints."""
