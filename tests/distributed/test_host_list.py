"""SLURM's short forms of hosts and tasks."""

import pytest

from mrl.distributed.host_list import expand_host_list, first_host, num_tasks_on_node
from mrl.errors import UserError

LISTS = {
    "node7": ["node7"],
    "node[1-3,07-09],login": ["node1", "node2", "node3", "node07", "node08", "node09", "login"],
    "rack[1-2]-gpu[01-02]": ["rack1-gpu01", "rack1-gpu02", "rack2-gpu01", "rack2-gpu02"],
    "10.0.0.[9-11]": ["10.0.0.9", "10.0.0.10", "10.0.0.11"],
}


@pytest.mark.parametrize("text", LISTS)
def test_a_node_list_is_its_hosts(text):
    assert expand_host_list(text) == LISTS[text]
    assert first_host(text) == LISTS[text][0]


@pytest.mark.parametrize("text", ["", "node[1-", "node[a-b]", "node[3-1]", "a,,b", "a,"])
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(UserError, match="Set MASTER_ADDR"):
        expand_host_list(text)


def test_tasks_of_each_node():
    assert [num_tasks_on_node("4(x2),3,12(x1)", node) for node in range(4)] == [4, 4, 3, 12]
