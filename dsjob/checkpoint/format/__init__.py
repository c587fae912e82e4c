"""How a checkpoint is written down: the standalone reader, and values, dtypes and headers as it knows them."""
