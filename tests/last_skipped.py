"""`pytest --last-skipped`: runs the tests that the last run skipped, after what they need was installed."""

import pytest

KEY = "mrl/skipped"


class LastSkipped:
    """Pytest plugin: records which tests a run skips, and with `--last-skipped` keeps only those of the run before."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.add(report.nodeid)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if config.getoption("last_skipped"):
            if (cache := getattr(config, "cache", None)) is None:  # as with -p no:cacheprovider
                raise pytest.UsageError("--last-skipped reads pytest's cache, and there is none")
            wanted = set(cache.get(KEY, []))
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
            items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_sessionfinish(self) -> None:
        is_worker = hasattr(self._config, "workerinput")  # of xdist: the controller has the reports of all
        cache = getattr(self._config, "cache", None)
        if not is_worker and not self._config.getoption("collectonly") and cache is not None:
            cache.set(KEY, sorted(self._skipped))


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--last-skipped", action="store_true", help="run only the tests that the last run skipped")
