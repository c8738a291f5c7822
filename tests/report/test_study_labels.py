"""Names in figures can be read: none lies over another, no curve or mark runs through one, none is cut off."""

from copy import deepcopy

import pytest

from softless.study.page import write_page
from tests.report.conftest import CHROMIUM
from tests.report.documents import estimate, write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

FIND = """() => {
  const NAMES = ".annotation-text, .textpoint text, .legendtext";
  const TICKS = ".xtick text, .ytick text, .xtitle, .ytitle, .xcategory text, .ycategory text";
  const faults = [], names = [];
  const inner = (element, by = 1) => {
    const { left, right, top, bottom } = element.getBoundingClientRect();
    return { left: left + by, right: right - by, top: top + by, bottom: bottom - by };
  };
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const shown = (element) => element.textContent.trim() && element.getBoundingClientRect().width;
  for (const plot of document.querySelectorAll(".plot")) {
    if (!plot.offsetParent) continue;
    const own = [...plot.querySelectorAll(NAMES)].filter(shown);
    const texts = [...own, ...[...plot.querySelectorAll(TICKS)].filter(shown)];
    names.push(...own.map((each) => `${plot.id}: ${each.textContent.trim()}`));
    texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
      if (meet(inner(a), inner(b))) faults.push(`${plot.id}: "${a.textContent}" over "${b.textContent}"`);
    }));
    const frame = plot.getBoundingClientRect();
    for (const name of texts) {
      const box = inner(name);
      const across = box.left < frame.left - 2 || box.right > frame.right + 2;
      if (across || box.top < frame.top - 2 || box.bottom > frame.bottom + 2)
        faults.push(`${plot.id}: "${name.textContent}" is cut off`);
    }
    for (const path of plot.querySelectorAll("path.js-line, .errorbar path, .shapelayer path")) {
      if (!path.getAttribute("d")) continue;
      const matrix = path.getScreenCTM(), length = path.getTotalLength();
      const hit = new Set();
      for (let at = 0; at <= length; at += 2) {
        const { x, y } = path.getPointAtLength(at).matrixTransform(matrix);
        const point = { left: x, right: x, top: y, bottom: y };
        own.filter((name) => meet(point, inner(name))).forEach((name) => hit.add(name.textContent));
      }
      hit.forEach((name) => faults.push(`${plot.id}: a curve runs through "${name}"`));
    }
    for (const mark of plot.querySelectorAll(".points path.point")) {
      const box = inner(mark);
      if (box.right <= box.left) continue;
      const under = own.filter((name) => meet(box, inner(name)));
      under.forEach((name) => faults.push(`${plot.id}: a mark stands on "${name.textContent}"`));
    }
  }
  return { faults, names };
}"""


def crowded(whole):
    """Twins that cost and reach nearly the same, from one seed; lines that cross SDPA's at one number of tokens."""
    report = deepcopy(whole)
    for index, twin in enumerate(report["twins"]):
        mean = 0.955 + 0.001 * index
        twin["accuracy"] = {"mean": mean, "low": None, "high": None, "n": 1}
        twin["seconds_per_epoch"] = 5 + 0.02 * index
        twin["seeds"] = twin["seeds"][:1]
    for trend in report["speed"]["trends"]:
        if trend["crossover"]:
            trend |= {"crossover": 64, "faster_everywhere": True}
    for layer in report["layers"]:
        layer["local_mass"] = estimate(0.108 + 0.002 * len(layer["twin"]) / 10, 0.004)
    for layer in report["range"]["layers"]:
        layer["range"] = estimate(1.0)
        layer["error"] = estimate(0.05)
    return report


def two_lengths(whole):
    """A quick study: two twins, two lengths."""
    report = deepcopy(whole)
    report["speed"]["laps"] = [lap for lap in report["speed"]["laps"] if lap["tokens"] in (256, 1024)]
    for trend in report["speed"]["trends"]:
        if trend["crossover"]:
            trend |= {"crossover": 256, "faster_everywhere": True}
    return report


WIDE, NARROW = (1280, "light"), (390, "dark")


@pytest.mark.parametrize(
    ("report", "window"),
    [
        (crowded, WIDE),
        (crowded, NARROW),
        (two_lengths, NARROW),
        pytest.param(two_lengths, WIDE, marks=pytest.mark.slow),
        pytest.param(deepcopy, WIDE, marks=pytest.mark.slow),
        pytest.param(deepcopy, NARROW, marks=pytest.mark.slow),
    ],
)
def test_no_name_lies_over_another_and_no_curve_runs_through_one(open_page, whole, tmp_path, report, window):
    width, theme = window
    page = open_page(width, theme, write_page(write(tmp_path, report(whole))))
    found = page.evaluate(FIND)
    assert found["faults"] == []
    assert len(found["names"]) >= (15 if width > 700 else 5)
    page.close()
