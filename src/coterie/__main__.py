"""`python -m coterie` is the command line."""

from coterie.cli.base import main

main()
