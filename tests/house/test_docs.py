"""The documentation builds without a warning, and shows docstrings as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import softless

pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_built(site):
    pages = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    built = [site / (page.parent if page.name == "index" else page) / "index.html" for page in pages]
    assert [path for path in built if not path.exists()] == []


def test_doctests_are_shown_as_code(site):
    text = (site / "reference/index.html").read_text()
    assert "<p>&gt;&gt;&gt;" not in text
    assert '<span class="gp">&gt;&gt;&gt; </span>' in text


def test_no_page_shows_a_stray_backslash(site):
    """Inside code, a table shows the backslash that protects a bar. Scripts and code blocks may have any."""
    for page in site.rglob("index.html"):
        text = re.sub(r"<(script|style|pre)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        assert "\\|" not in text, page
        assert "\\_" not in text, page


def test_nothing_is_fetched_when_a_page_is_read(site):
    for page in site.rglob("index.html"):
        text = page.read_text()
        assert 'src="http' not in text, page
        assert 'rel="stylesheet" href="http' not in text, page
    for name in re.findall(r"url\((.*?)\)", (site / "assets/katex/katex.min.css").read_text()):
        assert (site / "assets/katex" / name).exists()


def test_formulas_are_marked_for_the_script_that_renders_them(site):
    text = (site / "idea/index.html").read_text()
    assert '<span class="arithmatex">\\(' in text
    assert '<div class="arithmatex">\\[' in text
    for name in ("assets/katex/katex.min.js", "assets/formulas.js"):
        assert f'src="../{name}"' in text
        assert (site / name).exists()


def test_the_reference_is_headed_by_the_names_that_users_import(site):
    headings = set(re.findall(r'<h3 id="([\w.]+)"', (site / "reference/index.html").read_text()))
    modules = {"errors", "nn", "parallel"}
    names = {f"softless.{name}" for name in softless.__all__ if name not in modules}
    names |= {f"softless.nn.{name}" for name in softless.nn.__all__}
    assert names <= headings
