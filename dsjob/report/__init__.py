"""The report of runs: one HTML page with curves and tables, which needs no network."""
