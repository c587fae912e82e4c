"""The front door: everything you can do with a job. `import dsjob` exports these functions; the CLI calls them."""
