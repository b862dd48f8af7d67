"""Exact, fast building blocks that stand alone, by scikit-learn's conventions."""

from .certificate import Certificate, certify, certify_frozen
from .regression import SubsetOfSignals

__all__ = ["Certificate", "SubsetOfSignals", "certify", "certify_frozen"]
