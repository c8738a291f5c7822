"""The page in a real browser: quiet, complete, and answering to mouse, keyboard and paper."""

import base64
import json
from pathlib import Path

import pytest

from softless.study.page import write_page
from tests.report.conftest import CHROMIUM
from tests.report.documents import TAUS, write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
FIGURES = 19  # plots, in twelve figures


@pytest.fixture(params=["wide", pytest.param("narrow", marks=pytest.mark.slow)])
def page(request):
    return request.getfixturevalue(request.param)


def trace(page, figure, **meta):
    """A trace of a plot as it is shown now."""
    found = [each for each in page.evaluate(f"document.getElementById('{figure}').data") if each.get("meta")]
    (only,) = [each for each in found if all(each["meta"].get(key) == value for key, value in meta.items())]
    return only


def pixels(page, selector):
    return page.evaluate(f"document.querySelector('{selector}').toDataURL()")


def test_the_page_writes_nothing_to_the_console_and_makes_no_request(page):
    assert page.said == []
    assert {address.split(":")[0] for address in page.asked} <= {"file", "data", "blob"}
    assert [address for address in page.asked if address.startswith("file")] == [page.url.split("#")[0]]


def test_every_figure_is_drawn(page):
    assert page.locator(".plot[data-drawn=yes] svg.main-svg").count() >= FIGURES
    assert page.locator(".plot:not([data-drawn])").count() == 0
    empty = page.evaluate(
        "[...document.querySelectorAll('.plot')].filter((p) => !p.querySelector('.plot path')).length"
    )
    assert empty == 0


def test_nothing_is_wider_than_the_window(page):
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    over = "[...document.querySelectorAll('main :is(h1,h2,h3,h4,p,figure,.plot,canvas,pre,.switch,.slider,.scroll)')]"
    over += ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
    assert page.evaluate(over) == []


def test_figures_are_in_the_colors_of_the_theme(wide, narrow):
    assert trace(wide, "local-mass-0", twin="softmax")["line"]["color"] == "#1a1a1a"
    assert trace(narrow, "local-mass-0", twin="softmax")["line"]["color"] == "#ecebe8"


def test_the_button_changes_the_theme_and_back(wide):
    background = "getComputedStyle(document.body).backgroundColor"
    before = wide.evaluate(background)
    wide.click("#theme")
    assert wide.evaluate(background) != before
    assert trace(wide, "local-mass-0", twin="inline")["line"]["color"] == "#5ab0e8"
    assert wide.get_attribute("#theme", "aria-pressed") == "true"
    wide.click("#theme")
    assert wide.evaluate(background) == before
    assert trace(wide, "local-mass-0", twin="inline")["line"]["color"] == "#0072b2"


def test_hovering_a_patch_shows_where_each_mechanism_looks_from_there(wide):
    shown = []
    for patch, place in ((18, 100), (0, 10)):
        wide.hover("#viewer-source", position={"x": place, "y": place})
        assert wide.get_attribute("#viewer-source", "data-patch") == str(patch)
        shown.append(pixels(wide, "#viewer-maps canvas"))
    assert shown[0] != shown[1]
    assert wide.text_content("#viewer-says").startswith(
        "From row 1, column 1, this share of the positive weight falls on the 3 x 3 patches around it: softmax "
    )
    assert wide.locator("#viewer-maps canvas").count() == 6


def test_a_click_holds_the_patch_and_another_lets_go(wide):
    box = wide.locator("#viewer-source").bounding_box()
    wide.click("#viewer-source", position={"x": box["width"] - 5, "y": 5})
    wide.hover("#viewer-source", position={"x": 5, "y": 5})
    assert wide.get_attribute("#viewer-source", "data-patch") == "7"
    wide.click("#viewer-source", position={"x": 5, "y": box["height"] - 5})
    assert wide.get_attribute("#viewer-source", "data-patch") == "56"
    wide.hover("#viewer-source", position={"x": 5, "y": 5})
    assert wide.get_attribute("#viewer-source", "data-patch") == "0"


def test_arrow_keys_move_the_patch_and_stop_at_the_edge(page):
    page.focus("#viewer-source")
    for _ in range(8):
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#viewer-source", "data-patch") == "0"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#viewer-source", "data-patch") == "9"
    assert page.text_content("#viewer-says").startswith("From row 2, column 2")


def test_the_viewer_states_the_share_that_the_report_has(wide, whole):
    wide.focus("#viewer-source")
    patch = int(wide.get_attribute("#viewer-source", "data-patch"))
    layer = wide.input_value("#viewer-layer")
    image = int(wide.get_attribute(".thumbs button[aria-checked=true]", "data-image"))
    row, column = divmod(patch, 8)
    found = next(m for m in whole["viewer"]["maps"] if (m["twin"], m["layer"], m["image"]) == ("inline", layer, image))
    weights = base64.b64decode(found["weights"])[64 * patch : 64 * patch + 64]
    near = [weights[8 * r + c] for r in range(8) for c in range(8) if abs(r - row) <= 1 and abs(c - column) <= 1]
    share = round(100 * sum(near) / sum(weights))
    assert f"inline {share}%" in wide.text_content("#viewer-says")


def test_another_image_another_layer_and_one_scale_change_the_maps(page):
    shown = [pixels(page, "#viewer-maps canvas")]
    page.focus(".thumbs button[aria-checked=true]")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute(".thumbs button[aria-checked=true]", "data-image") == "1"
    shown.append(pixels(page, "#viewer-maps canvas"))
    page.select_option("#viewer-layer", "blocks.0.attn")
    shown.append(pixels(page, "#viewer-maps canvas"))
    page.check("#viewer-scale")
    shown.append(pixels(page, "#viewer-maps div:nth-child(3) canvas"))
    page.uncheck("#viewer-scale")
    shown.append(pixels(page, "#viewer-maps div:nth-child(3) canvas"))
    assert len(set(shown)) == len(shown)


def test_the_slider_moves_the_marks_the_line_and_the_sentence(page):
    page.focus("#tau")
    page.keyboard.press("Home")
    for steps in (0, 7):
        for _ in range(steps):
            page.keyboard.press("ArrowRight")
        path, mark = (trace(page, "threshold-0", twin="inline", **{kind: True}) for kind in ("path", "follows"))
        assert (mark["x"], mark["y"]) == ([path["x"][steps]], [path["y"][steps]])
        (line,) = page.evaluate("document.getElementById('range-error-0').layout.shapes")
        assert line["x0"] == TAUS[steps]
        softmax = trace(page, "threshold-0", twin="softmax", path=True)
        kept, lost = softmax["x"][steps], softmax["y"][steps]
        assert page.text_content("#tau-says").startswith(
            f"At tau = {TAUS[steps]:.2f}, softmax keeps {kept:.1f}% of its keys and loses {lost:.1f}% of its weight"
        )
        rows = page.locator("#tau-rows tr").all_text_contents()
        assert len(rows) == 6
        assert rows[0] == f"softmax{kept:.1f}{lost:.1f}"
        assert page.text_content("#tau-value") == f"{TAUS[steps]:.2f}"


def test_a_twin_leaves_every_figure_and_comes_back(wide):
    chip = ".chip[data-twin=inline]"
    for shown in (False, True):
        wide.focus(chip)
        wide.keyboard.press("Enter")
        assert wide.get_attribute(chip, "aria-pressed") == str(shown).lower()
        for figure in ("local-mass-0", "mask-out-0", "induced-1", "learning-0"):
            assert trace(wide, figure, twin="inline")["visible"] is shown
            assert trace(wide, figure, twin="softmax")["visible"] is True
        assert wide.locator(".panel[data-twin=inline]").is_visible() is shown
        assert wide.locator("#viewer-maps canvas:visible").count() == 5 + shown


def test_a_switch_changes_what_is_shown(wide):
    wide.focus("input[name=cost]:checked")
    wide.keyboard.press("ArrowRight")
    marks = [each for each in wide.evaluate("document.getElementById('cost-0').data") if each["visible"]]
    assert {mark["meta"]["pick"] for mark in marks} == {"macs"}
    title = "document.getElementById('cost-0').layout.xaxis.title.text"
    assert wide.evaluate(title) == "multiply-adds per image"
    wide.click("#speed-curves .switch label:last-child")
    assert wide.evaluate("document.getElementById('speed-curves-0').layout.yaxis.title.text").endswith("MB")


def test_alone_in_an_empty_folder_every_link_works(wide, narrow, sent, folder, whole):
    assert [each.name for each in sent.parent.iterdir()] == ["sent.html"]
    taken = {}
    for page, half in ((wide, slice(9)), (narrow, slice(9, None))):  # Chromium starts ten downloads of a page at most
        links = page.locator("a[download]").all()
        assert len(links) == 12 + 5
        for link in links[half]:
            with page.expect_download() as download:
                link.click()
            taken[download.value.suggested_filename] = Path(download.value.path()).read_text()
        for link in page.locator("a:not([download])").all():
            assert page.locator(link.get_attribute("href")).count() == 1
        assert page.said == []
    assert taken["twins.csv"] == (folder / "twins.csv").read_text()
    assert json.loads(taken["layers.json"]) == whole["layers"]
    assert json.loads(taken["report.json"]) == whole


def test_elements_that_scroll_sideways_have_a_cue(narrow, wide):
    assert wide.locator(".cue:visible").count() <= 1
    chips = narrow.locator(".chips")
    assert chips.get_attribute("data-more") == "right"
    assert narrow.locator(".legend .cue").is_visible()
    scrolled = narrow.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((e) => e.offsetParent && e.scrollWidth > e.clientWidth + 2)"
        ".map((e) => [e.dataset.more, e.nextElementSibling.textContent])"
    )
    assert scrolled
    assert all(more == "right" and "scroll sideways" in cue for more, cue in scrolled)
    narrow.evaluate("document.querySelector('.chips').scrollLeft = 1e6")
    narrow.wait_for_selector(".chips[data-more=left]")
    narrow.evaluate("document.querySelector('.chips').scrollLeft = 0")
    narrow.wait_for_selector(".chips[data-more=right]")


def test_another_width_draws_the_figures_anew(wide):
    drawn = "document.getElementById('cost-0').layout.width"
    before = wide.evaluate(drawn)
    assert before > 390
    for width, fits in ((390, f"{drawn} < 390"), (1280, f"{drawn} === {before}")):
        wide.set_viewport_size({"width": width, "height": 900})
        done = f"{fits} && document.documentElement.scrollWidth === {width}"
        wait = f"(finish) => {{ const look = () => {done} ? finish() : setTimeout(look, 50); look(); }}"
        wide.evaluate(f"new Promise({wait})")


def test_everything_that_can_be_done_can_be_reached_with_the_tab_key(wide):
    reach = "[...document.querySelectorAll('button, input, select, summary, a[href], #viewer-source')]"
    silent = ".filter((e) => e.tabIndex < 0 && !e.matches('.thumbs button')).length"
    assert wide.evaluate(reach + silent) == 0
    named = "e.textContent.trim() || e.ariaLabel || e.labels?.length || e.querySelector('img[alt]')"
    assert wide.evaluate(f"{reach}.filter((e) => !({named})).length") == 0
    assert wide.evaluate("[...document.querySelectorAll('.plot')].every((e) => e.role === 'img' && e.ariaLabel)")


def test_the_printed_page_is_light_and_fits_the_paper(narrow):
    narrow.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert narrow.evaluate("document.documentElement.dataset.theme") == "light"
    assert trace(narrow, "local-mass-0", twin="softmax")["line"]["color"] == "#1a1a1a"
    widths = "['local-mass-0', 'mask-out-0'].map((id) => document.getElementById(id).layout.width)"
    assert narrow.evaluate(widths) == [680, 320]
    narrow.evaluate("dispatchEvent(new Event('afterprint'))")
    width = "document.getElementById('local-mass-0')._fullLayout.width"
    narrow.evaluate(
        f"new Promise((done) => {{ const look = () => {width} <= 390 ? done() : setTimeout(look, 50); look(); }})"
    )
    assert trace(narrow, "local-mass-0", twin="softmax")["line"]["color"] == "#ecebe8"


@pytest.mark.slow
def test_the_page_can_be_printed(wide):
    pages = wide.pdf(format="A4").count(b"/Type /Page\n")
    assert 5 < pages < 20


def test_after_all_this_the_console_is_still_quiet(page):
    assert page.said == []


def test_a_page_with_missing_sections_writes_nothing_to_the_console(open_page, folder, report):
    for part in ("mask_out", "induced", "collinear", "range", "viewer", "speed", "tables"):
        report[part] = None
    report["layers"] = [layer for layer in report["layers"] if layer["name"] == "blocks.0.attn"]
    for twin in report["twins"]:
        twin["macs"] = twin["parameters"] = None
    bare = write(folder / "bare", report)
    write_page(bare)
    page = open_page(390, "light", bare / "index.html")
    assert page.said == []
    assert page.locator(".missing:visible").count() == 4
    assert page.locator(".plot[data-drawn=yes]").count() == page.locator(".plot").count() == 2 + 4 + 1
    shown = "document.getElementById('confusions-1').data.filter((trace) => trace.visible).length"
    assert page.evaluate(shown) == 1
    assert page.locator(".switch").count() == 0
