"""Prints what reading from an object store costs, as one table: `python -m benchmarks.remote`.

The server is that of the tests, on this machine: its latency and bandwidth are those of a network,
its CPU time is not. A part is a module beside this one that prints rows `name, size, value, unit`.
"""

from benchmarks.scale.__main__ import print_parts

PARTS = ("bandwidth", "opening", "cache", "nodes", "peers")

if __name__ == "__main__":
    print_parts(__package__, __doc__, PARTS)
