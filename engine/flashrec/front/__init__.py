"""Several processes that speak HTTP in front of the one that runs the engine.

Beside the engine's thread one process answered 377 requests of 50 choices a second where the engine alone did 692
(H200, 2026-11-30): Python runs one thread at a time. So parsing, tokenising and rendering go to *front* processes, each
the whole application of :mod:`flashrec.server` over a scheduler that is in another process.

The engine's process binds one socket per front on the same port, starts the fronts, tells each what it serves, and
answers what they ask over a private pipe. A front that dies is replaced; when the engine's process dies, or drains,
all do.
"""
