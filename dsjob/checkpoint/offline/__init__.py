"""Work on checkpoints without a running job: convert, compare, verify, copy."""
