"""Writes transformers models and peft adapters: the folders that `from_pretrained` loads."""
