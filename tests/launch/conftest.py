"""What the tests of launchers share: SLURM's two nodes, and one run to compare with."""

import pytest

from tests.e2e import runs
from tests.launch.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """metrics.jsonl of two ranks that torchrun's variables started."""
    folder = tmp_path_factory.mktemp("expected")
    runs.train_in_pool(folder, SHORT, 2)
    return (folder / "run" / "metrics.jsonl").read_text()


SHORT = ("train.num_steps=2",)
