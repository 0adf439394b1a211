"""The paper's tables: its numbers, our results in their cells, and both as Markdown, LaTeX or HTML."""

from pfml.paper.tables import Cell, Row, Section, Table, paper_tables

__all__ = ["Cell", "Row", "Section", "Table", "paper_tables"]
