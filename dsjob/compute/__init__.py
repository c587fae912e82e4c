"""Numerics: precision, loss scale, forward and backward passes, activation checkpointing, repeated blocks."""
