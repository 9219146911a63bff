"""Helpers that many tests need: a pool of ranks, single-device references, gradients with exact sums."""
