"""Works on checkpoints without a running job: converts, compares, verifies and copies them."""
