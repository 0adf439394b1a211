"""Metrics only: retrieval, classification, verification, clustering, and the alignment of proxies with data."""

from pfml.evaluation.alignment import Alignment, proxy_alignment
from pfml.evaluation.classification import Classification, classification_metrics
from pfml.evaluation.clustering import kmeans, normalized_mutual_information
from pfml.evaluation.hyperbolic import hyperbolic_recall_at_1
from pfml.evaluation.metrics import METRICS, Metric
from pfml.evaluation.model_evaluation import EmbeddedTest, embed, embed_test, evaluate
from pfml.evaluation.nearest_neighbors import nearest
from pfml.evaluation.ranks import QueryScores, query_scores
from pfml.evaluation.reranking import Expansion, KReciprocal, expand_queries, reranked_metrics
from pfml.evaluation.retrieval import RetrievalMetrics, retrieval_metrics
from pfml.evaluation.verification import Verification, verification_metrics

__all__ = [
    "METRICS",
    "Alignment",
    "Classification",
    "EmbeddedTest",
    "Expansion",
    "KReciprocal",
    "Metric",
    "QueryScores",
    "RetrievalMetrics",
    "Verification",
    "classification_metrics",
    "embed",
    "embed_test",
    "evaluate",
    "expand_queries",
    "hyperbolic_recall_at_1",
    "kmeans",
    "nearest",
    "normalized_mutual_information",
    "proxy_alignment",
    "query_scores",
    "reranked_metrics",
    "retrieval_metrics",
    "verification_metrics",
]
