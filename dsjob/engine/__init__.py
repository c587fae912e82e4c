"""DeepSpeed's calls over a strategy, an optimizer and a schedule."""
