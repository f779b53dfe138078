"""``python -m deltazoo``: the ``deltazoo`` command."""

from deltazoo.cli import main

main()
