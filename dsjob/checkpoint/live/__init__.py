"""Saves and loads a running engine. All ranks take part."""
