"""Faults that a vendor could make, seeded in copies of the two example backends.

They were chosen before the conformance suite was read, from the sources of the examples and the pages for vendors.
"""
