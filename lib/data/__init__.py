"""Files of records ➜ token ids ➜ micro-batches."""
