import pytest

from mrl.environments.base import Action, ToolCall
from mrl.errors import UserError
from tests.distributed.worker_processes.attacks import CALM
from tests.distributed.worker_processes.run_attacks import Target, together
from tests.environments.episodes import descendants, pool, replies
from tests.rewards.test_scorer import gone


def ran(many, episode, code):
    many.send(episode, Action("", "", (ToolCall("python", {"code": code}),)))
    return replies(many, 1)[episode].observation.messages[0]["content"]


@pytest.mark.slow
def test_programs_run_in_the_worker_of_their_episode_and_end_at_their_limit():
    before = descendants()
    try:
        many = pool("python", {"time_limit_s": 2.0, "max_output_bytes": 300})
    except UserError as error:
        pytest.skip(str(error))
    with many:
        many.open("a", 0, {})
        many.open("b", 0, {})
        replies(many, 2)
        assert ran(many, "a", "print(2 ** 10); open('x', 'w').write('1')") == "1024\n"
        assert ran(many, "a", "print(open('x').read())") == "1\n"
        assert "FileNotFoundError" in ran(many, "b", "open('x')")
        assert ran(many, "a", "import time; time.sleep(60)") == "Error: it took longer than 2 s"
        assert ran(many, "a", "print('x' * 1000)") == "x" * 300 + "\nError: it printed more than 300 bytes"
        assert "PermissionError" in ran(many, "a", "import socket; socket.socket()")
        assert ran(many, "b", "import os; os.abort()").endswith("Error: the program ended with signal 6")
    assert all(map(gone, descendants() - before))


@pytest.mark.slow
def test_no_attack_has_an_effect(tmp_path):
    names = list(CALM)[::4]
    targets = {name: Target(tmp_path / str(number)) for number, name in enumerate(names)}
    try:
        many = pool("python", {"time_limit_s": 60.0}, time_limit_s=120.0)
    except UserError as error:
        pytest.skip(str(error))
    with many:
        many.open("a", 0, {})
        replies(many, 1)
        assert ran(many, "a", together(targets)) == "end\n"
        assert ran(many, "a", "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')").startswith(
            "Error: it made"
        )
        assert ran(many, "a", "import os; print(os.listdir())") == "[]\n"
    assert {name: changed for name, one in targets.items() if (changed := one.changed())} == {}


def test_bounds_that_are_none_are_refused():
    with pytest.raises(UserError, match="expected numbers above 0"):
        pool("python", {"time_limit_s": 0})
