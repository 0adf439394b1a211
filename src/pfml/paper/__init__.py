"""What the paper reports: every number of its tables, and of its ablation figure as far as it can be read, as data."""

from pfml.paper.tables import PaperCell, PaperRow, PaperSection, PaperTable, Picture, paper_pictures, paper_tables

__all__ = ["PaperCell", "PaperRow", "PaperSection", "PaperTable", "Picture", "paper_pictures", "paper_tables"]
