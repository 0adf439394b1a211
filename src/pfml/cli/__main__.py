"""`python -m pfml.cli` is `pfml`."""

from pfml.cli import main

main()
