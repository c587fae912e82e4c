"""The engine: DeepSpeed's calls on top of a strategy, an optimizer and a schedule."""
