"""The commands of ``deltazoo``, one module each, with a function ``register(app)``."""
