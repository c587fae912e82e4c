"""Trains a model whose layers are spread over the stages of a pipeline."""
