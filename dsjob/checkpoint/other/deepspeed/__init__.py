"""DeepSpeed's checkpoints: reading them, and writing them."""
