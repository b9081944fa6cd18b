"""Pruned networks that compute with the weights they keep, and with nothing else.

What a network computes:    graph (plain data), capture (found out of a model of torch, by exported, calls, passes and
                            folds), reference (computed in torch), storing, unread and loading (in files)
How it is computed:         taps (weights), lowering (operations), liveness (channels that matter), planes and layouts
                            (where numbers are), matrices and program (what native code reads), runner, network
Where torch is needed:      borrowed (nodes that native code does not know), follower (attacks on a model), training
Native code:                native (the library), build (how it is compiled), native/ (the C++)
"""
