"""`python -m pfml`: the command line, where its script is not on the path."""

from pfml.cli import main

if __name__ == "__main__":
    main()
