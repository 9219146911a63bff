"""The rules, and the optimizers that run them on shards."""
