"""`python -m fishleg` is the command line."""

from fishleg.cli import main

main()
