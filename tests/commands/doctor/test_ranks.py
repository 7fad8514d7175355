from mrl.commands.doctor.ranks import check_hosts, check_same, describe_rank, format_ranges, hosts_of_ranks
from mrl.distributed.launcher_env import LauncherEnv


def said(*hosts, **facts):
    """`describe_rank` of ranks that are spread over hosts in that order; facts: name -> value on each rank."""
    seen: dict[str, int] = {}
    found = []
    for rank, host in enumerate(hosts):
        seen[host] = seen.get(host, -1) + 1
        own = {name: values[rank] for name, values in facts.items()}
        found.append({"host": host, "local_rank": seen[host], "local_world_size": 2, "facts": own})
    return found


def told(findings):
    ((level, found),) = [(each.level, each.found) for each in findings]
    return level, found


def test_a_rank_says_who_it_is():
    own = describe_rank(LauncherEnv(3, 4, 1, 2), {"torch": "2.13.0"})
    assert (own["local_rank"], own["local_world_size"], own["facts"]) == (1, 2, {"torch": "2.13.0"}) and own["host"]


def test_the_map_of_hosts():
    assert told(check_hosts(said("a", "a", "b", "b"))) == ("ok", "a: 0-1; b: 2-3")


def test_ranks_that_are_dealt_out_in_turn():
    level, found = told(check_hosts(said("a", "b", "a", "b")))
    assert level == "warning" and found.startswith("a has ranks 0, 2:")


def test_hosts_with_different_numbers_of_ranks():
    level, found = told(check_hosts(said("a", "a", "b")))
    assert level == "warning" and "between 1 and 2 ranks" in found


def test_two_hosts_of_one_name_stay_two():
    both = said("vm", "vm") + said("vm", "vm")
    assert hosts_of_ranks(both) == {"vm": [0, 1], "vm(2)": [2, 3]}
    assert told(check_hosts(both)) == ("warning", "2 hosts have the name vm")


def test_another_version_is_named_with_its_ranks_and_hosts():
    them = said("a", "a", "b", "b", torch=["2.13.0", "2.13.0", "2.13.0", "2.12.1"], python=["3.11"] * 4)
    level, found = told(check_same(them, hosts_of_ranks(them)))
    assert (level, found) == ("problem", "torch is 2.13.0, but 2.12.1 on rank(s) 3 (b)")
    for each in them:
        each["facts"]["torch"] = "2.13.0"
    assert told(check_same(them, hosts_of_ranks(them)))[0] == "ok"


def test_a_driver_may_differ_and_a_config_may_not():
    them = said("a", "b", **{"NVIDIA driver": ["570.1", "570.2"]})
    assert told(check_same(them, hosts_of_ranks(them)))[0] == "warning"
    (only,) = check_same(said("a", "b", config=["0a", "0b"]), {"a": [0], "b": [1]})
    assert only.level == "problem" and "shared folder" in only.advice


def test_ranks_in_spans():
    assert format_ranges([5, 0, 1, 2]) == "0-2, 5"
