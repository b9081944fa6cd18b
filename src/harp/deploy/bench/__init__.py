"""Benchmark a network: file size, latency and memory, in the sparse engine and in other runtimes.

`runtimes` lists the runtimes; `prepared` makes the file that each of them reads; `clock` times them in turns; `fresh`
starts a process for each, which measures memory and cold start.
"""

__all__ = [
    "measuring",
    "prepared",
]
