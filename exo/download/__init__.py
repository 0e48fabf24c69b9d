"""Getting a model's files onto this machine."""
