"""Fixtures of the made-up GPU, for all tests of the harness."""

from support.fake_gpu import gpu, made, measurer

__all__ = ["gpu", "made", "measurer"]
