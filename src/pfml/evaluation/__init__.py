"""Retrieval metrics, clustering, and how proxies and data agree."""

from pfml.evaluation.alignment import Alignment, proxy_alignment
from pfml.evaluation.clustering import kmeans, normalized_mutual_information
from pfml.evaluation.evaluate import embed, evaluate
from pfml.evaluation.metrics import METRICS, Metric
from pfml.evaluation.nearest_neighbors import nearest
from pfml.evaluation.ranks import QueryScores, query_scores
from pfml.evaluation.retrieval import RetrievalMetrics, retrieval_metrics
from pfml.storage.embeddings import EmbeddedImages, open_embeddings, read_embeddings, write_embeddings

__all__ = [
    "METRICS",
    "Alignment",
    "EmbeddedImages",
    "Metric",
    "QueryScores",
    "RetrievalMetrics",
    "embed",
    "evaluate",
    "kmeans",
    "nearest",
    "normalized_mutual_information",
    "open_embeddings",
    "proxy_alignment",
    "query_scores",
    "read_embeddings",
    "retrieval_metrics",
    "write_embeddings",
]
