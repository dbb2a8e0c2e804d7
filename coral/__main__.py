"""`python -m coral`."""

from coral.cli import main

main()
