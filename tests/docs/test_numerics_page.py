"""docs/numerics.md shows the committed results, and their worst errors."""

from __future__ import annotations

from script_modules import load_script

render = load_script("render_numerics")


def test_the_committed_page_is_what_the_script_renders() -> None:
    assert render.PAGE.read_text() == render.render()


def test_the_worst_error_counts_calls_without_gradients_and_what_is_not_finite() -> None:
    row = {"errors": {"output": 0.1, "d_q": 0.2}, "forward": {"output": 0.3}}
    assert render.worst_of(row) == 0.3
    assert render.worst_of(row | {"forward": {"output": None}}) is None
    assert [render.number(x) for x in (None, 0.0, 0.0123, 4.8e-3, 1.2e9)] == [
        "not finite",
        "0",
        "0.012",
        "4.8e-3",
        "1.2e9",
    ]


def test_a_peer_that_refuses_a_call_is_quoted() -> None:
    content = {
        "run": {
            "gpu": "H200",
            "torch": "2",
            "triton": "3",
            "commit": "0123456789ab",
            "date": "2026-01-01T00",
            "fla": "0.6",
        },
        "rows": [
            {
                "cell": "a",
                "library": "deltazoo",
                "forward_ms": 0.2,
                "forward_backward_ms": 1.0,
                "errors": {"output": 3e-3},
            },
            {"cell": "a", "library": "flashqla", "forward_ms": 0.3, "error": "AssertionError: K == V == 128"},
        ],
    }
    assert "| a | 0.2 | 1 | 3.0e-3 | 0.3 | AssertionError: K == V == 128 |  | not measured |  |  |" in render.cells(
        content
    )
