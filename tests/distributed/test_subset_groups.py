"""Groups that only their ranks make: the others take no part, and one made anew meets the ranks of now."""

import torch
import torch.distributed as dist

from mrl.distributed.subset_groups import new_subgroup
from tests.ranks import run_ranks


def sums(ranks):
    """Of this rank's number, in groups of the same ranks that are made one after the other and destroyed."""
    found = []
    for count in range(3):
        group = new_subgroup(ranks, f"test-{ranks}-{count}", backend="gloo")
        if dist.get_rank() not in ranks:
            assert not isinstance(group, dist.ProcessGroup)
            continue
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        found.append(int(total))
        dist.destroy_process_group(group)
    return found


def test_a_group_is_made_by_its_ranks_alone_and_made_anew_after_its_end():
    assert run_ranks(3, sums, [1, 2]) == [[], [3, 3, 3], [3, 3, 3]]
