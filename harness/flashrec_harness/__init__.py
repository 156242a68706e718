"""The FlashRec harness: decides, with evidence, whether an engine is right, reproducible and fast."""
