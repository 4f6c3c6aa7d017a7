"""`python -m gradbus`: the same as the command `gradbus`."""

from gradbus.cli import main

main()
