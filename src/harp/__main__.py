"""`python -m harp`, and with it `torchrun -m harp`."""

from harp.cli import main

main()
