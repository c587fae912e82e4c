"""What a document may say: schemas and rules, the typed job, and how problems are reported."""
