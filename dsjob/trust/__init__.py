"""What a document may import, and the only module that imports it (`targets`)."""
