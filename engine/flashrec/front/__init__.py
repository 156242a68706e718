"""Several processes that speak HTTP in front of the one that runs the engine.

A process answers some 500 requests of 50 choices a second, whatever the device could do, and shares that with the
engine's own host work: Python runs one thread at a time. So parsing, tokenising and rendering go to *front*
processes, each the whole application of :mod:`flashrec.server` over a scheduler that is in another process.

The engine's process binds one socket per front on the same port, starts the fronts, tells each what it serves, and
answers what they ask over a private pipe. A front that dies is replaced; when the engine's process dies, or drains,
all do.
"""
