"""``python -m deltazoo``: the ``deltazoo`` command."""

from deltazoo.cli.app import main

main()
