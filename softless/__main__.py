"""`python -m softless` is the `softless` command."""

from softless.cli import main

main()
