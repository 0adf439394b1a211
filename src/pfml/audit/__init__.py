"""Audit of labels: find images that are probably mislabeled, and correct them."""

from pfml.audit.decisions import corrections_of, read_decisions, write_suspects, write_table
from pfml.audit.detection import DETECTION_LABELS, Detection, detection, precision_recall
from pfml.audit.run_audit import audit_run, write_corrections
from pfml.audit.suspects import Audit, Neighbor, Suspect, audit

__all__ = [
    "DETECTION_LABELS",
    "Audit",
    "Detection",
    "Neighbor",
    "Suspect",
    "audit",
    "audit_run",
    "corrections_of",
    "detection",
    "precision_recall",
    "read_decisions",
    "write_corrections",
    "write_suspects",
    "write_table",
]
