"""http-cost: what HTTP takes of the throughput that the engine has in process, and what it adds to the tail."""
