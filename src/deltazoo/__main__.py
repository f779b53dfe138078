"""``python -m deltazoo`` is ``deltazoo``."""

from deltazoo.workbench.cli.app import main

main()
