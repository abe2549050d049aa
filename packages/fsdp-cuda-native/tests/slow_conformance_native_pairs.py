"""Pairs of options, by the thousand and with values that take seconds: ``nox -s conformance``."""

from __future__ import annotations

import test_conformance
from fsdp_core.testing.suite.numerics.pairs import PairsSuite

DECLARED = test_conformance.TestNative


class TestManyPairs(PairsSuite):
    strategy = DECLARED.strategy
    meshes = DECLARED.meshes
    own_dimensions = DECLARED.own_dimensions
    own_rules = DECLARED.own_rules
    refused_pairs = DECLARED.refused_pairs
    not_in_pairs = DECLARED.not_in_pairs
    drawn_pairs = 300
