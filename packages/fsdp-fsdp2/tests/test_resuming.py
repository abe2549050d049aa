"""Exact resume: a run that goes on from a checkpoint repeats the run that wrote it."""

from fsdp_core.testing.suite.resuming import ExactResumeSuite


class TestExactResume(ExactResumeSuite):
    strategy = "fsdp2"
