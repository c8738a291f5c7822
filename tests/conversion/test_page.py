"""The page of a conversion says what was measured, and nothing about what was not."""

import json
from pathlib import Path

import pytest

from softless.conversion.page import write_page

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def page(tmp_path):
    def written(record: str, **changes) -> str:
        document = json.loads((RECORDS / f"convert-{record}.json").read_text())
        rest = {"name": "a model", "data": "some text", "texts": None}
        return write_page(tmp_path, document | rest | changes).read_text()

    return written


def test_other_orders_are_explained_where_they_were_run(page):
    assert "from the first layer" in page("minilm-2-0")
    assert "from the first layer" not in page("smollm2-cpu")


def test_the_time_of_a_single_length_is_a_sentence(page):
    cost = [{"tokens": 256, "seconds": [0.04212, 0.08], "bytes": None}]
    told = page("minilm-2-0", cost=cost)
    assert "One pass over 256 tokens takes 0.0421 s with the original and 0.08 s converted." in told
    assert "One pass over" not in page("minilm-2-0", cost=[])


def test_a_line_that_leaves_the_figure_is_told(page):
    assert "leave the figure" in page("minilm-2-0", budget=0.001)
    assert "leave the figure" not in page("minilm-2-0")


def test_a_model_without_recall_has_no_such_part(page):
    assert "reads tokens in a random order" in page("smollm2-cpu")
    assert "reads tokens in a random order" not in page("minilm-2-0")


def test_samples_are_text_and_never_html(page):
    text = {"prompt": "<b>bold</b>", "original": "a", "converted": "b"}
    assert "&lt;b&gt;bold&lt;/b&gt;" in page("smollm2-cpu", texts=[text])
