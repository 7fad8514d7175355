import pytest

from mrl.environments.base import Action
from mrl.environments.guess_number import Guess


@pytest.mark.parametrize("seed", range(20))
def test_halving_finds_the_number(seed):
    game, low, high = Guess(max_guesses=7, discount=0.5), 1, 100
    assert "from 1 to 100" in game.reset(seed, {}).messages[0]["content"]
    for _ in range(7):
        guess = (low + high) // 2
        seen = game.step(Action(f"I say {guess}"))
        if seen.done:
            break
        low, high = (guess + 1, high) if seen.messages[0]["content"] == "higher" else (low, guess - 1)
    assert seen.terminated and seen.reward == 0.5 ** (seen.info["num_guesses"] - 1)


def test_it_ends_after_the_last_guess():
    game = Guess(low=5, high=5, max_guesses=2)
    assert game.reset(0, {"prompt": "Which number?"}).messages == ()
    assert game.step(Action("none")).messages[0]["content"] == "Write a number."
    last = game.step(Action("4"))
    assert last.terminated and last.reward == 0.0


def test_the_number_is_a_function_of_the_seed():
    def number(seed):
        game = Guess(high=10**6)
        game.reset(seed, {})
        return game._number

    assert number(3) == number(3) and len({number(seed) for seed in range(50)}) > 40
