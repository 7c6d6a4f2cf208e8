"""In CI a test that is skipped counts as failed, unless its reason is on a short list: `pytest --no-skips`."""

from __future__ import annotations

import pytest

ALLOWED = {  # reason -> why CI may lack what the test needs
    "only root may mount a small disk": "a container may have to do without the right to mount",
    "the package index cannot be reached": "a run may have no network, and nobody has fetched the files before",
}


class NoSkips:
    """Fails a run in which something was skipped for a reason that is not allowed."""

    def __init__(self) -> None:
        self._skipped: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file, which may be skipped as a whole."""
        self._look(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Has the exit status report failed tests."""
        if self._skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Lists the skipped tests, each with what to do."""
        for test, reason in self._skipped:
            terminalreporter.write_line(
                f"SKIPPED, which counts as failed: {test}: {reason}; install what it needs, or see tests/skips.py",
                red=True,
            )

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason not in ALLOWED:
            self._skipped.append((report.nodeid, reason))
