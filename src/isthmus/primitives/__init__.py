"""Exact, fast building blocks that stand alone, by scikit-learn's conventions."""

from .certificate import Certificate, certify, certify_frozen
from .kmeans import KMeans, kmeans_batched
from .regression import SubsetOfSignals

__all__ = ["Certificate", "KMeans", "SubsetOfSignals", "certify", "certify_frozen", "kmeans_batched"]
