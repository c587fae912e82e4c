"""The front door: what can be done with a job. `import dsjob` offers these functions, and the commands call them."""
