"""A whole report, made once; each test gets a copy that it may spoil."""

from copy import deepcopy

import pytest

pytest.importorskip("plotly")
pytest.importorskip("jinja2")
pytest.importorskip("sklearn")

from softless.report.study_style import looks
from tests.report import documents


@pytest.fixture(scope="session")
def whole():
    return documents.report()


@pytest.fixture
def report(whole):
    return deepcopy(whole)


@pytest.fixture
def twins(report):
    return looks(report["twins"])
