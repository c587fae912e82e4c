"""The root folder of a job's checkpoints: attempts, committed checkpoints, retention and garbage collection."""
