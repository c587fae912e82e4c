"""The folder that a job's checkpoints lie in: attempts, committed checkpoints, and what may be deleted."""
