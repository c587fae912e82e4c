"""What a document may contain: schemas and rules, the typed job, and reports of problems."""
