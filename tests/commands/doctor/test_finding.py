from mrl.commands.doctor.finding import findings_of, ok
from mrl.errors import UserError


def breaks():
    yield ok("disk", "there")
    raise OSError("no such device\nmore")


def refuses():
    raise UserError("train.num_steps is a word")
    yield


def test_a_check_that_fails_says_so_and_keeps_what_it_found():
    first, second = findings_of("disk", breaks)
    assert (first.level, second.level) == ("ok", "warning")
    assert second.found == "this check itself failed: OSError: no such device"


def test_a_mistake_of_the_user_is_a_problem():
    (only,) = findings_of("config", refuses)
    assert (only.level, only.found) == ("problem", "train.num_steps is a word")
