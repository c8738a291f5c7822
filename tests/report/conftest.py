"""A whole report, made once; each test gets a copy that it may spoil. And its page, in a real browser."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest

pytest.importorskip("plotly")
pytest.importorskip("jinja2")
pytest.importorskip("sklearn")

from softless.study.page import write_page
from softless.study.page.figure import looks
from tests.report import documents

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
WAIT = 60_000  # milliseconds


@pytest.fixture(scope="session")
def whole():
    return documents.report()


@pytest.fixture
def report(whole):
    return deepcopy(whole)


@pytest.fixture
def twins(report):
    return looks(report["twins"])


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory) -> Path:
    folder = documents.write(tmp_path_factory.mktemp("report"), whole)
    write_page(folder)
    return folder


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def sent(folder, tmp_path_factory) -> Path:
    """The page alone, in a folder that was empty."""
    return Path(shutil.copy(folder / "index.html", tmp_path_factory.mktemp("alone") / "sent.html"))


@pytest.fixture(scope="module")
def open_page(browser, sent):
    """The page in a window of this width and theme, with all it said and asked for."""

    def opened(width: int, theme: str, path: Path = sent):
        window = {"width": width, "height": 900}
        page = browser.new_page(viewport=window, color_scheme=theme, reduced_motion="reduce")
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.set_default_timeout(WAIT)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    return opened


@pytest.fixture(scope="module")
def wide(open_page):
    return open_page(1280, "light")


@pytest.fixture(scope="module")
def narrow(open_page):
    return open_page(390, "dark")
