import pytest
from tiny_serving import byte_tokenizer, tiny

from deltazoo.serving import Engine


@pytest.fixture
def engine_of():
    """Makes engines, started unless told otherwise; the test's end stops them."""
    engines = []

    def make(model=None, *, start=True, **options):
        options = {"widths": (4,), "prompt_piece": 8, "eos_token_id": ()} | options
        engine = Engine(tiny() if model is None else model, byte_tokenizer(), **options)
        if start:
            engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop(timeout=0)
