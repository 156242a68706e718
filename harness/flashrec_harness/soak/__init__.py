"""soak: minutes of mixed load in which nothing may be wrong, leak or grow."""
