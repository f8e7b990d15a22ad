"""The pytest plug-in: `pytest --mlc-conformance --backend NAME` runs the cases as pytest items, without a test file.

Every pytest run of an environment that has torch-mlc loads this module. Without the flag it does nothing: it imports
pytest alone, and adds options that begin with ``--mlc-conformance``. The short ones (``--backend``) are added with the
flag alone, and left to whoever else has options of these names.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .kit.case import Case
    from .kit.subject import Subject
    from .table import CaseRow

FLAG = "--mlc-conformance"
# Short name with the flag, what it means, and how it is read.
SHORT = {
    "backend": dict(metavar="NAME", help="the backend: a name that torch.compile takes, or package.module:function"),
    "backend-options": dict(metavar="JSON", help="the options that it is given, as a JSON object"),
    "conformance-other-options": dict(metavar="JSON", help="a second set, under which half types round otherwise"),
    "conformance-skip": dict(metavar="CASES", action="append", help="cases to leave out: names, topics or globs"),
    "conformance-xfail": dict(
        metavar="CASES=REASON", action="append", help="cases that have to fail, and why: a fault that is known"
    ),
}


def _module(name: str) -> Any:
    """A module beside this one, which brings torch."""
    return importlib.import_module(f"{__package__}.{name}")


def _long(short: str) -> str:
    return f"{FLAG}-{short.removeprefix('conformance-')}"


def _dest(option: str) -> str:
    return option.strip("-").replace("-", "_")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mlc-conformance", "checks of a backend of torch.compile (torch-mlc)")
    group.addoption(FLAG, action="store_true", help="run the conformance cases, and no other tests, on --backend")
    group.addoption(f"{FLAG}-list", action="store_true", help="list the conformance cases, and run nothing")
    group.addoption(f"{FLAG}-json", metavar="FILE", help="write the results of the conformance cases here")
    for short, how in SHORT.items():
        group.addoption(_long(short), **how)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Iterator[None]:
    """After the user's conftest files, which may have an option of a short name themselves."""
    yield
    if early_config.known_args_namespace.mlc_conformance:
        early_config.pluginmanager.register(SeveralWorkers(), "mlc-conformance-workers")
        group = parser.getgroup("mlc-conformance")
        for short, how in SHORT.items():
            with contextlib.suppress(ValueError, argparse.ArgumentError):
                group.addoption(f"--{short}", dest=f"mlc_short_{_dest(short)}", **how)


def _value(config: pytest.Config, short: str) -> Any:
    return config.getoption(_dest(_long(short))) or config.getoption(f"mlc_short_{_dest(short)}", None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.getoption(_dest(f"{FLAG}-list")):
        return None
    print(_module("table").listing())
    return 0


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(_dest(FLAG)):
        config.pluginmanager.register(ConformanceRun(config), "mlc-conformance-run")


# Each holds some 700 MiB with torch's larger backends.
MOST_WORKERS = 4


class SeveralWorkers:
    """All cases are shared among workers where xdist is there, and neither `-n` nor `-k` were given, nor a debugger."""

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Iterator[None]:
        option = config.option
        chosen = any(getattr(option, name, None) for name in ("keyword", "tx", "usepdb", "lf", "collectonly"))
        several = min(MOST_WORKERS, _processors())
        if several > 1 and getattr(option, "numprocesses", 0) is None and not chosen and not _is_worker(config):
            option.numprocesses = several
        return (yield)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ConformanceRun:
    """The hooks of a run with the flag."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: list[CaseRow] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """The cases in the place of what pytest would find; a wrong name is told before anything runs."""
        subject, skipped, known = self._subject(), self._skipped(), self._known()

        def perform_collect(*_: Any, **__: Any) -> list[pytest.Item]:
            root = Cases.from_parent(session, name="conformance", nodeid="conformance")
            root.given = subject, skipped, known
            items: list[Any] = list(session.genitems(root))
            if _is_worker(self.config):  # those that wait come first: nobody is left with one of them at the end
                items.sort(key=lambda item: not item.case.starts_processes)
            session.items = items
            self.config.hook.pytest_collection_modifyitems(session=session, config=self.config, items=session.items)
            self.config.hook.pytest_collection_finish(session=session)
            session.testscollected = len(session.items)
            return session.items

        session.perform_collect = perform_collect  # type: ignore[method-assign]

    def _subject(self) -> Subject:
        name = _value(self.config, "backend")
        if not name:
            raise pytest.UsageError(
                f"{FLAG} asks for a backend: --backend NAME ({FLAG}-backend where another plug-in has --backend)"
            )
        errors = _module("kit.subject")
        try:
            subject: Subject = errors.Subject(
                name, self._json("backend-options") or {}, self._json("conformance-other-options")
            )
        except errors.UnknownBackendError as error:
            raise pytest.UsageError(str(error)) from error
        return subject

    def _json(self, short: str) -> dict[str, Any] | None:
        text = _value(self.config, short)
        try:
            found: dict[str, Any] | None = None if text is None else _module("given").json_object(text)
        except ValueError as error:
            raise pytest.UsageError(f"--{short}: {error}") from error
        return found

    def _chosen(self, patterns: list[str]) -> frozenset[str]:
        registry = _module("registry")
        try:
            names: frozenset[str] = registry.chosen(patterns)
        except registry.UnknownCaseError as error:
            raise pytest.UsageError(str(error)) from error
        return names

    def _skipped(self) -> frozenset[str]:
        given = _value(self.config, "conformance-skip") or []
        return self._chosen([p.strip() for text in given for p in text.split(",") if p.strip()])

    def _known(self) -> dict[str, str]:
        """Cases that have to fail, by name, each with its reason."""
        pairs = [text.partition("=")[::2] for text in _value(self.config, "conformance-xfail") or []]
        return {name: reason.strip() for pattern, reason in pairs for name in self._chosen([pattern.strip()])}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = _module("table").row_of(report)
        if row is not None:
            self.rows.append(row)

    def pytest_sessionfinish(self) -> None:
        file = self.config.getoption(_dest(f"{FLAG}-json"))
        if file and not _is_worker(self.config):
            _module("table").write_json(file, self.rows, _value(self.config, "backend"), self._json("backend-options"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.rows:
            terminalreporter.section(f"conformance of {_value(self.config, 'backend')}")
            terminalreporter.write_line(_module("table").summary(self.rows))


class Cases(pytest.Collector):
    """All cases of a backend."""

    given: tuple[Subject, frozenset[str], dict[str, str]]

    def collect(self) -> Iterator[CaseTopic]:
        by_topic: dict[str, list[Case]] = {}
        for case in _module("registry").CASES:
            by_topic.setdefault(case.topic, []).append(case)
        for name, cases in by_topic.items():
            topic = CaseTopic.from_parent(self, name=name)
            topic.cases, topic.given = cases, self.given
            yield topic


class CaseTopic(pytest.Collector):
    """The cases of one topic."""

    cases: list[Case]
    given: tuple[Subject, frozenset[str], dict[str, str]]

    def collect(self) -> Iterator[CaseItem]:
        subject, skipped, known = self.given
        for case in self.cases:
            item = CaseItem.from_parent(self, name=case.name.rpartition("::")[2])
            item.case, item.subject = case, subject
            if case.name in skipped:
                item.add_marker(pytest.mark.skip(reason="asked for by --conformance-skip"))
            if case.name in known:
                item.add_marker(pytest.mark.xfail(reason=known[case.name], strict=True))
            yield item


class CaseFailed(Exception):
    """A case that does not hold, as pytest shows it."""


class CaseItem(pytest.Item):
    """One case."""

    case: Case
    subject: Subject

    def runtest(self) -> None:
        verdict = _module("runner").run_case(self.case, self.subject)
        self.user_properties.append(("mlc_conformance", [self.case.name, verdict.seconds, verdict.told]))
        if verdict.status == "skipped":
            pytest.skip(verdict.told)
        if verdict.status == "failed":
            lines = [
                verdict.told,
                f"  the trap: {self.case.trap}",
                f"  why it matters: {self.case.why}",
                verdict.details,
            ]
            raise CaseFailed("\n".join(filter(None, lines)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CaseFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.config.rootpath / "conformance" / self.case.topic, 0, self.case.name
