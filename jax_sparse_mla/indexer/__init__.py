"""The indexer: its keys, their logits, and the selection of the entries that a query attends to."""
