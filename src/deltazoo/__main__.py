"""``python -m deltazoo``: the ``deltazoo`` command."""

from deltazoo.workbench.cli.app import main

main()
