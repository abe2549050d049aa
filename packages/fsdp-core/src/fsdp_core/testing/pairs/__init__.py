"""Pairs of options: configurations are drawn that combine them, and each is compared with one unsharded process.

``dimensions`` lists what is combined, ``drawing`` draws configurations, ``net`` is the model, ``oracle`` trains it
without any of our code, ``running`` trains it on ranks, and ``comparing`` puts the ranks' parts together and compares
them.
"""
