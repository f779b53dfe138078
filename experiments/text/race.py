"""The learning rate of a configuration by successive halving: all rates start, and the worst ones stop early."""

from collections.abc import Callable, Collection, Mapping

from experiments.text.text_recipe import TextRecipe
from experiments.text.training import Training

__all__ = ["train_best"]


def train_best(
    recipe: TextRecipe,
    losses: Mapping[tuple[float, int], float],
    trained: Collection[float],
    *,
    start: Callable[[float], Training],
    advance: Callable[[Training, int], None],
    keep: Callable[[float, int, float, Training], None],
) -> Training | None:
    """Train with every rate until a rung drops it, and with the last one to the end.

    If its loss is not finite there, the rate that was dropped last is trained in its place.

    Args:
        recipe: its rates, rungs and steps.
        losses: as of `TextRecipe.standing`, found before.
        trained: rates with which a training went to the end before.
        start: makes the training with a rate.
        advance: advances a training to a step.
        keep: called with rate, rung, loss and training for each loss that `losses` lacks.

    Returns:
        The whole training; None if the last rate is among those of `trained`.

    Raises:
        ArithmeticError: the loss is finite with no rate.
    """
    losses = dict(losses)
    running: dict[float, Training] = {}

    def reach(rate: float, steps: int) -> Training:
        if rate not in running:
            running[rate] = start(rate)
        advance(running[rate], steps)
        return running[rate]

    def judge(rate: float, rung: int, training: Training) -> None:
        losses[rate, rung] = round(training.judged(recipe.judged_steps), 5)
        keep(rate, rung, losses[rate, rung], training)

    while True:
        rates, rung = recipe.standing(losses)
        if not rates:
            raise ArithmeticError(f"the loss is finite at none of the learning rates {recipe.rates}")
        for dropped in running.keys() - set(rates):
            del running[dropped]
        if rung is None:
            if rates[0] in trained:
                return None
            training = reach(rates[0], recipe.steps)
            if training.is_finite:
                return training
            judge(rates[0], recipe.rungs[-1], training)
        else:
            for rate in rates:
                if (rate, rung) not in losses:
                    judge(rate, rung, reach(rate, rung))
