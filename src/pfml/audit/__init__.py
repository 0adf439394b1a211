"""Audit of images and labels: find what is mislabeled, copied, far from the rest or of poor quality, and correct it."""

from pfml.audit.decisions import corrections_of, is_index, read_decisions, write_suspects, write_table
from pfml.audit.detection import DETECTION_LABELS, Detection, detection, precision_recall
from pfml.audit.duplicates import DuplicateGroup, find_duplicates
from pfml.audit.exchange import read_exported, write_fiftyone, write_label_studio
from pfml.audit.faults import Faults, find_faults, write_faults
from pfml.audit.folder_audit import audit_folder
from pfml.audit.run_audit import audit_run, of_training, write_corrections
from pfml.audit.suspects import Audit, Neighbor, Suspect, audit

__all__ = [
    "DETECTION_LABELS",
    "Audit",
    "Detection",
    "DuplicateGroup",
    "Faults",
    "Neighbor",
    "Suspect",
    "audit",
    "audit_folder",
    "audit_run",
    "corrections_of",
    "detection",
    "find_duplicates",
    "find_faults",
    "is_index",
    "of_training",
    "precision_recall",
    "read_decisions",
    "read_exported",
    "write_corrections",
    "write_faults",
    "write_fiftyone",
    "write_label_studio",
    "write_suspects",
    "write_table",
]
