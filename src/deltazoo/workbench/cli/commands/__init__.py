"""One module, one command: each has a function ``register(app)``."""
