"""Who takes part in a job: processes and devices, where they meet, and which of them failed."""
