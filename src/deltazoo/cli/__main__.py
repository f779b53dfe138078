"""``python -m deltazoo.cli`` is ``deltazoo``."""

from deltazoo.cli.app import main

main()
