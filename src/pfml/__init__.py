"""Potential field based deep metric learning: every embedding is a charge.

loss = PotentialFieldLoss(num_classes, embedding_dim)
loss(embeddings, labels).backward()
"""

from pfml.energy import class_potential, class_potentials, forces, potential_energy
from pfml.field import ContrastiveLaw, DecayLaw, LogarithmicLaw, PowerLaw
from pfml.labels import LabelMap
from pfml.losses import CollapseWarning, FieldDiagnostics, PotentialFieldLoss

__version__ = "0.1.0"

__all__ = [
    "CollapseWarning",
    "ContrastiveLaw",
    "DecayLaw",
    "FieldDiagnostics",
    "LabelMap",
    "LogarithmicLaw",
    "PotentialFieldLoss",
    "PowerLaw",
    "class_potential",
    "class_potentials",
    "forces",
    "potential_energy",
]
