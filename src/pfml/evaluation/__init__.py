"""Metrics only: retrieval, clustering, and the alignment of proxies with data."""

from pfml.evaluation.alignment import Alignment, proxy_alignment
from pfml.evaluation.clustering import kmeans, normalized_mutual_information
from pfml.evaluation.metrics import METRICS, Metric
from pfml.evaluation.model_evaluation import embed, evaluate
from pfml.evaluation.nearest_neighbors import nearest
from pfml.evaluation.ranks import QueryScores, query_scores
from pfml.evaluation.retrieval import RetrievalMetrics, retrieval_metrics

__all__ = [
    "METRICS",
    "Alignment",
    "Metric",
    "QueryScores",
    "RetrievalMetrics",
    "embed",
    "evaluate",
    "kmeans",
    "nearest",
    "normalized_mutual_information",
    "proxy_alignment",
    "query_scores",
    "retrieval_metrics",
]
