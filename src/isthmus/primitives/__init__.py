"""Exact, fast building blocks that stand alone, by scikit-learn's conventions."""

from .certificate import Certificate, certify, certify_frozen
from .forecast import FilterBank, rank_report
from .kmeans import KMeans, kmeans_batched
from .regression import SubsetOfSignals

__all__ = ["Certificate", "FilterBank", "KMeans", "SubsetOfSignals", "certify", "certify_frozen", "kmeans_batched", "rank_report"]
