"""Steps that are composed at random, and compared with one unsharded process.

``grammar`` composes a step as a short program, ``running`` runs it under a strategy, and ``oracle`` without any.
"""
