"""Benchmark a network: file size, latency and memory, in the sparse engine and in other runtimes.

`files` makes the file that each runtime reads, of the same network. `measure` times all runtimes in turns, then starts
a fresh process for each, which measures memory and cold start.
"""

__all__ = [
    "files",
    "measure",
]
