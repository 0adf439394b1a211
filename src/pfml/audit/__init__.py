"""Audit of labels: which training images are probably called by a wrong name, and what to do about it."""

from pfml.audit.decisions import corrections_of, read_decisions, write_suspects, write_table
from pfml.audit.quality import Detection, detection, precision_recall
from pfml.audit.run_audit import audit_run, write_corrections
from pfml.audit.suspects import Audit, Neighbor, Suspect, audit

__all__ = [
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
