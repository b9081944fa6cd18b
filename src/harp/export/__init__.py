"""A finished network as files for elsewhere, each checked in a process of its own before it is there.

`making` writes them; `verify` is the check, which needs torch only for files that do.
"""
