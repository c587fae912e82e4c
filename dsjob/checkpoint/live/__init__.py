"""Saving and loading a running engine, all ranks together."""
