"""Reading Chrome traces of the torch profiler: integrity first, then structure and ratios, never speed.

The profiler makes host code two to three times slower, so no number from here is a performance figure.
"""
