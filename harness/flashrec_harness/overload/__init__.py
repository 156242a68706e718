"""overload: what a server does at a multiple of its capacity."""
