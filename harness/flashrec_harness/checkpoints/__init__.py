"""Checkpoints to test with: trained from a catalog and histories, or random weights of a named shape."""
