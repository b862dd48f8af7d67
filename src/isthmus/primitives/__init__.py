"""Exact, fast building blocks that stand alone, by scikit-learn's conventions."""

from .regression import SubsetOfSignals

__all__ = ["SubsetOfSignals"]
