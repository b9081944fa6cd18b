"""What a network costs to use: bytes, time and memory, in the sparse engine and in other runtimes.

`runtimes` knows who can compute a network, each from a file of its own; `prepared` makes these files of an artefact;
`clock` lets runtimes take turns; `fresh` starts a process for each, which shows memory and a cold start.
"""
