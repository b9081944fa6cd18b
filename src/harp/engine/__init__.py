"""The sparse CPU engine: pruned networks that compute with their nonzero weights only.

graph/              a network as plain data, its reference implementation in torch, and passes over it
capture/            from a torch model to a graph
format/             the `.harp` file format
load, store         networks from and to `.harp` files
footprint           how much memory and time a file would take
lowering/           from a graph to programs of the native code
native/             the C++ code, its build and its bindings
runner, network     run the programs
follower            attacks on a torch model whose weights change
sparse_training     training with sparse layers
"""

__all__ = [
    "capture",
    "follower",
    "format",
    "graph",
    "load",
    "network",
    "sparse_training",
    "store",
]
