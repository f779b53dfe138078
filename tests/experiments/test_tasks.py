"""Every task says what it claims to say: answers checked against a plain, slow reading of the inputs."""

from __future__ import annotations

import pytest
import torch

from experiments import IGNORED, Task, get_task, list_tasks
from experiments.tasks.arithmetic import BRACKETS, NO_BRACKETS
from experiments.tasks.digits import DIGITS
from experiments.tasks.groups import S5_SLOW, S5_SWAPS, GroupWord, _table
from experiments.tasks.needle import NUMBER
from experiments.tasks.overwrite import OVERWRITE, Overwrite
from experiments.tasks.palindrome import PALINDROME
from experiments.tasks.parity import PARITY, Parity
from experiments.tasks.recall import RECALL
from experiments.tasks.reset import RESET_SMALL, SELECTIVE_RESET, Reset
from experiments.tasks.stack import STACK

LENGTHS = {
    "digits": 64,
    "digits_large": 784,
    "recall_large": 256,
    "recall_long": 800,
    "overwrite_large": 40,
    "reset_small": 20,
}
SYMBOLIC = [name for name in list_tasks() if get_task(name).channels is None and name != "byte_text"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(task: Task, length: int, rows: int = 64, seed: int = 0):
    return task.sample(rows, length, generator(seed))


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbols_answers_and_repeatability(name: str) -> None:
    task = get_task(name)
    length = LENGTHS.get(name, 41)
    batch, again, other = draw(task, length), draw(task, length), draw(task, length, seed=1)
    assert torch.equal(batch.inputs, again.inputs) and torch.equal(batch.targets, again.targets)
    assert not torch.equal(batch.inputs, other.inputs)
    assert batch.inputs.min() >= 0 and batch.inputs.max() < task.vocab_size
    asked = batch.targets[batch.targets != IGNORED]
    assert asked.min() >= 0 and asked.max() < task.num_classes
    assert batch.graded.any() and (batch.targets[batch.graded] != IGNORED).all()


@pytest.mark.parametrize("name", [name for name in SYMBOLIC if name != "recall_large"])
def test_no_constant_guess_beats_chance(name: str) -> None:
    task = get_task(name)
    batch = draw(task, LENGTHS.get(name, 41), rows=512)
    answers = batch.targets[batch.graded]
    share = torch.bincount(answers).max() / len(answers)
    # Four standard deviations of the share, for the largest of all classes; groups are graded many times per row.
    noise = 4 * (task.chance * (1 - task.chance) / 512) ** 0.5
    extra = 0.05 if name.startswith("arithmetic") else 0.0  # a product modulo 5 is 0 more often than not
    assert share <= task.chance + noise + extra


def test_parity_by_counting() -> None:
    batch = draw(PARITY, 20, rows=8)
    for bits, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert answers == [sum(bits[: t + 1]) % 2 for t in range(20)]
    assert not batch.graded[:, :10].any() and batch.graded[:, 10:].all()


@pytest.mark.parametrize("task", [NO_BRACKETS, BRACKETS], ids=lambda task: task.name)
def test_expressions_by_python(task) -> None:
    symbols = [*map(str, range(5)), "+", "-", "*", "(", ")"]
    batch = draw(task, 31, rows=64)
    brackets = 0
    for row, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        text = "".join(symbols[symbol] for symbol in row)
        brackets += text.count("(")
        assert eval(text) % 5 == answers[-1]
        for end, answer in enumerate(answers, start=1):
            prefix = text[:end]
            if answer != IGNORED and prefix.count("(") == prefix.count(")"):
                assert eval(prefix) % 5 == answer
    assert (brackets > 64) == task.brackets
    assert (batch.targets[batch.graded] != IGNORED).all()


def test_a_bracket_answers_for_its_inside() -> None:
    symbols = [*map(str, range(5)), "+", "-", "*", "(", ")"]
    batch = draw(BRACKETS, 31, rows=32)
    for row, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        starts: list[int] = [0]
        text = "".join(symbols[symbol] for symbol in row)
        for t, symbol in enumerate(text):
            if symbol == "(":
                starts.append(t + 1)
            elif symbol == ")":
                starts.pop()
            if answers[t] != IGNORED:
                assert eval(text[starts[-1] : t + 1]) % 5 == answers[t]


@pytest.mark.parametrize(
    ("group", "swaps", "elements", "moves"), [("S3", False, 6, 6), ("S5", True, 120, 11), ("A5", False, 60, 60)]
)
def test_group_tables(group: str, swaps: bool, elements: int, moves: int) -> None:
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


def test_slow_moves_are_answered_at_their_last_token() -> None:
    slow, fast = draw(S5_SLOW, 6, rows=4), draw(GroupWord(name="x", group="S5"), 6, rows=4)
    assert torch.equal(slow.inputs[:, ::4], fast.inputs) and torch.equal(slow.targets[:, 3::4], fast.targets)
    assert (slow.inputs.unflatten(1, (6, 4))[:, :, 1:] == S5_SLOW.vocab_size - 1).all()
    assert S5_SWAPS.vocab_size == 12


def test_recall_by_a_dictionary() -> None:
    batch = draw(RECALL, 40)
    for row, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        pairs = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        asked = [t for t in range(40) if answers[t] != IGNORED]
        assert len(asked) == 8 and min(asked) >= 16
        assert all(pairs[row[t]] == RECALL.num_keys + answers[t] for t in asked)


def test_overwrite_and_reset_by_a_dictionary() -> None:
    for task, length in ((OVERWRITE, 16), (RESET_SMALL, 16), (SELECTIVE_RESET, 24)):
        batch = draw(task, length)
        is_reset = isinstance(task, Reset)
        for row, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            memory: dict[int, int] = {}
            asked = next(t for t in range(len(row)) if answers[t] != IGNORED)
            t = 0
            while t < asked - 1:
                if is_reset and row[t] == task.vocab_size - 2:
                    memory = {key: value for key, value in memory.items() if key >= task.num_keys}
                    t += 1
                    continue
                memory[row[t]] = row[t + 1]
                t += 2
            assert row[asked - 1] == task.vocab_size - 1
            offset = 2 * task.num_keys if is_reset else task.key_pool
            assert sorted(row[asked:]) == sorted(memory)
            assert all(memory[row[t]] == offset + answers[t] for t in range(asked, len(row)))


def test_palindrome_stack_and_needle() -> None:
    batch = draw(PALINDROME, 9, rows=4)
    assert torch.equal(batch.targets[:, 9:], batch.inputs[:, :9].flip(1))
    assert torch.equal(batch.inputs[:, 10:], batch.targets[:, 9:-1])

    batch = draw(STACK, 40)
    n = STACK.num_stacks
    for row, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        stacks: dict[int, list[int]] = {}
        for t in range(0, 80, 2):
            operation, element = row[t], row[t + 1] - 2 * n
            if operation < n:
                stacks.setdefault(operation, []).append(element)
                assert answers[t] == IGNORED
            else:
                assert answers[t] == element == stacks[operation - n].pop()

    batch = draw(NUMBER, 60)
    mark, question = NUMBER.vocab_size - 2, NUMBER.vocab_size - 1
    for row, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        start = row.index(mark)
        code = row[start + 1 : start + 8]
        assert row[-7:] == [question, *code[:-1]] and answers[-7:] == code


def test_digits_under_conditions() -> None:
    pytest.importorskip("sklearn", reason="the digits task needs scikit-learn")
    batch = draw(DIGITS, 64, rows=16)
    assert batch.inputs.shape == (16, 64, 1) and batch.inputs.min() >= 0 and batch.inputs.max() <= 1
    assert batch.graded.sum() == 16 and batch.graded[:, -1].all()
    clean = DIGITS.test_sample("clean", 0, generator())
    bright = DIGITS.test_sample("brightness 2", 0, generator())
    dropped = DIGITS.test_sample("dropout 0.5", 0, generator())
    noisy = DIGITS.test_sample("noise 0.5", 0, generator())
    assert torch.equal(bright.inputs, 2 * clean.inputs)
    kept = dropped.inputs[clean.inputs > 0] != 0
    assert 0.45 < kept.float().mean() < 0.55
    assert abs(float((noisy.inputs - clean.inputs).std()) - 0.5) < 0.02
    share = torch.bincount(clean.targets[:, -1]).max() / len(clean.targets)
    assert share <= DIGITS.chance + 0.02
    with pytest.raises(ValueError, match="'dropout 0.25', got 'blur 3'"):
        DIGITS.test_sample("blur 3", 0, generator())
    with pytest.raises(ValueError, match="64 pixels, got a length of 63"):
        draw(DIGITS, 63)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RECALL.sample(1, 20, generator()), "at least 24 tokens, got 20"),
        (lambda: NO_BRACKETS.check_length(10), "odd length only, got 10"),
        (lambda: RESET_SMALL.check_length(33), "at most as many void pairs, got 33"),
        (lambda: PARITY.check_length(0), "at least 1 tokens, got 0"),
        (lambda: PARITY.test_sample("bright", 1, generator()), "tested by length, got the condition 'bright'"),
        (lambda: GroupWord(name="x", group="M11"), "must be one of S3, S5, A5, got 'M11'"),
        (lambda: GroupWord(name="x", group="A5", swaps_only=True), "swaps are odd"),
        (lambda: Overwrite(name="x", num_keys=20), "between 1 and key_pool=16, got 20"),
        (lambda: get_task("partity"), "did you mean 'parity'"),
    ],
)
def test_impossible_tasks_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_one_name_one_task() -> None:
    from experiments import register_task

    assert register_task(Parity(name="parity")) == PARITY
    with pytest.raises(ValueError, match="taken by another task"):
        register_task(Reset(name="parity"))
