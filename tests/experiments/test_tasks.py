"""Every task says what it claims to say: answers checked against a plain, slow reading of the inputs."""

from __future__ import annotations

import pytest
import torch

from experiments.tasks import IGNORED, TASKS, Batch, Task
from experiments.tasks.memory import Reset
from experiments.tasks.state_tracking import _table

LENGTHS = {
    "digits": 64,
    "digits_large": 784,
    "recall_large": 256,
    "recall_long": 800,
    "overwrite_large": 40,
    "reset_small": 20,
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(task: str | Task, length: int, rows: int = 16, seed: int = 0) -> Batch:
    return (TASKS[task] if isinstance(task, str) else task).sample(rows, length, generator(seed))


def rows_of(batch: Batch) -> zip:
    return zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)


def test_every_task_draws_valid_batches_that_repeat() -> None:
    for name, task in TASKS.items():
        if task.channels is not None:
            continue
        length = LENGTHS.get(name, 41)
        batch, again, other = draw(name, length), draw(name, length), draw(name, length, seed=1)
        symbols, classes = task.sizes
        assert torch.equal(batch.inputs, again.inputs) and torch.equal(batch.targets, again.targets), name
        assert not torch.equal(batch.inputs, other.inputs), name
        assert batch.inputs.min() >= 0 and batch.inputs.max() < symbols, name
        asked = batch.targets[batch.targets != IGNORED]
        assert asked.min() >= 0 and asked.max() < classes, name
        assert batch.graded.any() and (batch.targets[batch.graded] != IGNORED).all(), name


def test_parity_by_counting() -> None:
    batch = draw("parity", 20, rows=8)
    for bits, answers in rows_of(batch):
        assert answers == [sum(bits[: t + 1]) % 2 for t in range(20)]
    assert not batch.graded[:, :10].any() and batch.graded[:, 10:].all()


def test_expressions_by_python() -> None:
    symbols = [*map(str, range(5)), "+", "-", "*", "(", ")"]
    assert "(" not in "".join(symbols[symbol] for row, _ in rows_of(draw("arithmetic", 31)) for symbol in row)
    for row, answers in (*rows_of(draw("arithmetic", 31)), *rows_of(draw("arithmetic_brackets", 31, rows=48))):
        text = "".join(symbols[symbol] for symbol in row)
        assert eval(text) % 5 == answers[-1]
        starts: list[int] = [0]
        for t, symbol in enumerate(text):
            if symbol == "(":
                starts.append(t + 1)
            elif symbol == ")":
                starts.pop()
            if answers[t] != IGNORED:  # a bracket answers for its inside
                assert eval(text[starts[-1] : t + 1]) % 5 == answers[t]


def test_words_of_groups() -> None:
    for group, swaps, elements, moves in (("S3", False, 6, 6), ("S5", True, 120, 11), ("A5", False, 60, 60)):
        table = _table(group, swaps)
        assert table.shape == (elements, moves)
        assert (table[:, 0] == torch.arange(elements)).all()  # move 0 is the identity
        for move in range(moves):
            assert sorted(table[:, move].tolist()) == list(range(elements))  # every move can be undone
        if swaps:
            assert all((table[table[:, move], move] == torch.arange(elements)).all() for move in range(moves))
        else:
            products = table[table[:, 1], 2]  # (x a) b = x (a b)
            assert (products == table[torch.arange(elements), table[table[0, 1], 2]]).all()
    # A slow move is answered at its last token.
    slow, fast = draw("s5_slow", 6, rows=4), draw("s5", 6, rows=4)
    assert torch.equal(slow.inputs[:, ::4], fast.inputs) and torch.equal(slow.targets[:, 3::4], fast.targets)


def test_recall_by_a_dictionary() -> None:
    task = TASKS["recall"]
    for row, answers in rows_of(draw(task, 40)):
        pairs = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        asked = [t for t in range(40) if answers[t] != IGNORED]
        assert len(asked) == 8 and min(asked) >= 16
        assert all(pairs[row[t]] == task.num_keys + answers[t] for t in asked)


@pytest.mark.parametrize("name", ["overwrite", "reset_small", "selective_reset"])
def test_overwrite_and_reset_by_a_dictionary(name: str) -> None:
    task = TASKS[name]
    symbols, _ = task.sizes
    for row, answers in rows_of(draw(task, 24)):
        memory: dict[int, int] = {}
        asked = next(t for t in range(len(row)) if answers[t] != IGNORED)
        t = 0
        while t < asked - 1:
            if isinstance(task, Reset) and row[t] == symbols - 2:
                memory = {key: value for key, value in memory.items() if key >= task.num_keys}
                t += 1
                continue
            memory[row[t]] = row[t + 1]
            t += 2
        assert row[asked - 1] == symbols - 1
        offset = 2 * task.num_keys if isinstance(task, Reset) else task.key_pool
        assert sorted(row[asked:]) == sorted(memory)
        assert all(memory[row[t]] == offset + answers[t] for t in range(asked, len(row)))


def test_palindrome_stack_and_needle() -> None:
    batch = draw("palindrome", 9, rows=4)
    assert torch.equal(batch.targets[:, 9:], batch.inputs[:, :9].flip(1))
    assert torch.equal(batch.inputs[:, 10:], batch.targets[:, 9:-1])

    n = TASKS["stack"].num_stacks
    for row, answers in rows_of(draw("stack", 40)):
        stacks: dict[int, list[int]] = {}
        for t in range(0, 80, 2):
            operation, element = row[t], row[t + 1] - 2 * n
            if operation < n:
                stacks.setdefault(operation, []).append(element)
                assert answers[t] == IGNORED
            else:
                assert answers[t] == element == stacks[operation - n].pop()

    symbols, _ = TASKS["needle_number"].sizes
    for row, answers in rows_of(draw("needle_number", 60)):
        start = row.index(symbols - 2)
        code = row[start + 1 : start + 8]
        assert row[-7:] == [symbols - 1, *code[:-1]] and answers[-7:] == code


def test_digits_under_conditions() -> None:
    pytest.importorskip("sklearn", reason="the digits task needs scikit-learn")
    task = TASKS["digits"]
    batch = draw(task, 64)
    assert batch.inputs.shape == (16, 64, 1) and batch.inputs.min() >= 0 and batch.inputs.max() <= 1
    assert batch.graded.sum() == 16 and batch.graded[:, -1].all()
    conditions = ("clean", "brightness 2", "dropout 0.5", "noise 0.5")
    clean, bright, dropped, noisy = (task.test_sample(name, 0, generator()) for name in conditions)
    assert torch.equal(bright.inputs, 2 * clean.inputs)
    assert 0.45 < (dropped.inputs[clean.inputs > 0] != 0).float().mean() < 0.55
    assert abs(float((noisy.inputs - clean.inputs).std()) - 0.5) < 0.02
    with pytest.raises(ValueError, match="'dropout 0.25', got 'blur 3'"):
        task.test_sample("blur 3", 0, generator())


def test_bytes_are_asked_for_the_next_one() -> None:
    batch = TASKS["byte_text"].test_sample(300, 4, generator())
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert not batch.graded[:, :44].any() and batch.graded[:, 44:].all()


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 24, got 20"):
        draw("recall", 20)
    with pytest.raises(ValueError, match="at most as many void pairs, got 33"):
        draw("reset_small", 33)
    with pytest.raises(ValueError, match="tested by length, got the condition 'bright'"):
        TASKS["parity"].test_sample("bright", 1, generator())
