"""Where blocks live: plans, placements, buffers, storage. Knows nothing of any optimizer."""
