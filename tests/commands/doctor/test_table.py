import json

from mrl.commands.doctor.finding import ok, problem, warning
from mrl.commands.doctor.table import as_json, as_lines, as_table, merge_hosts, status_of

ALIKE = [ok("memory", "20 GB"), ok("GPUs", "8 x H100")]
BAD = problem("disk", "'/out' is full", "free space")


def test_alike_findings_of_hosts_are_one_line_with_the_first_ones_figures():
    found = merge_hosts({"a": ALIKE, "b": [ok("memory", "19 GB"), ok("GPUs", "8 x H100"), BAD]})
    assert [(each.where, each.found) for each in found] == [
        ("all hosts", "20 GB"),
        ("all hosts", "8 x H100"),
        ("b", "'/out' is full"),
    ]


def test_the_hosts_of_a_problem_are_named_beside_those_that_are_well():
    low = warning("memory", "1 GB", "free some")
    by_host = {f"n{number}": [low if number > 3 else ok("memory", f"{number} GB")] for number in range(10)}
    found = merge_hosts(by_host)
    assert [(each.level, each.where) for each in found] == [
        ("ok", "n0, n1, n2, n3"),
        ("warning", "n4, n5, n6, n7 and 2 more"),
    ]


def test_one_host_needs_no_name():
    assert [each.where for each in merge_hosts({"a": ALIKE})] == ["", ""]


def test_a_problem_is_status_2_and_a_warning_is_not():
    assert status_of([*ALIKE, warning("a", "b", "c")]) == 0
    assert status_of([*ALIKE, BAD]) == 2


def test_plain_lines_table_and_json_say_the_same(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal the table has no colours
    found = merge_hosts({"a": ALIKE, "b": [*ALIKE, BAD]})
    lines = as_lines(found).splitlines()
    assert lines[-2:] == ["problem  disk    [b] '/out' is full -> free space", "1 problem, 0 warnings, 2 ok"]
    table = as_table(found, 120)
    assert "'/out' is full" in table and "-> free space" in table and "\x1b[" in table
    told = json.loads(as_json(found, {"a": [0], "b": [1]}))
    assert told["status"] == 2 and told["hosts"] == {"a": [0], "b": [1]}
    assert told["findings"][-1] == {
        "level": "problem", "topic": "disk", "found": "'/out' is full", "advice": "free space", "where": "b",
    }  # fmt: skip
