"""Tensor parallelism: layers whose weights are divided among ranks, which compute the same batch together."""
