"""Optimizers whose momentum travels as signs: one bit an element."""
