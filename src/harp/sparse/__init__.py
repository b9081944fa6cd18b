"""Pruned networks that compute with the weights they keep, and with nothing else.

`graph` says what a network computes, in plain data; `capture` finds it out for a model of torch; `reference` computes
it in torch.
"""
