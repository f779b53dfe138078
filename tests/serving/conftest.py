import pytest
from tiny_serving import byte_tokenizer, tiny

from deltazoo.serving import Engine


@pytest.fixture
def engine_of():
    """Makes engines, started unless told otherwise; the test's end stops them."""
    engines = []

    def make(model=None, *, start=True, ends=(), **options):
        options = {"widths": (4,), "prompt_piece": 8} | options
        model = tiny() if model is None else model
        model.generation_config.eos_token_id = [*ends]
        engine = Engine(model, byte_tokenizer(), **options)
        if start:
            engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop(timeout=0)
