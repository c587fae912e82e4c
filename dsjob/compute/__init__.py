"""How numbers are computed: precision, loss scale, forward and backward passes, activations, repeated blocks."""
