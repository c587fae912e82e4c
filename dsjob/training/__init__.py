"""A job as it runs: built from its spec, trained, evaluated, saved, and told of."""
