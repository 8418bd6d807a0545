"""Checkpoints: configuration, weights, and one file per architecture."""
