"""Checkpoints that other programs wrote, or read."""
