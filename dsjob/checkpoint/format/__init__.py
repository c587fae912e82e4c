"""The checkpoint format: the standalone reader, and how values, dtypes and headers are encoded."""
