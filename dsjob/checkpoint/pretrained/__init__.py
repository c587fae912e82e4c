"""Models of transformers and adapters of peft: the folders that `from_pretrained` loads."""
