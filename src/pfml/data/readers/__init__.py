"""Readers: one data set or layout, one file. `pfml.data.datasets` is the table of them."""
