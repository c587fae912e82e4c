"""What a document may import, and the one place that imports it."""
