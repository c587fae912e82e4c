"""Checkpoints in the formats of other programs: reading them, and writing them."""
