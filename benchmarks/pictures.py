"""Take the pictures of docs/ from a report: python benchmarks/pictures.py report docs/pictures

Needs playwright and a chromium. Each picture is one part of DIR/index.html, 1280 pixels wide, as a reader sees it.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
PARTS = {
    "viewer": "#attention",
    "queries": "#collinear",
    "masks": "#mask-out",
    "range": "#range-error",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(QUIET))
        page = browser.new_page(viewport={"width": 1280, "height": 2150}, reduced_motion="reduce")
        page.goto((arguments.report / "index.html").resolve().as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=120_000)
        page.screenshot(path=arguments.out / "report.png")
        page.add_style_tag(content=".legend { position: static !important; }")
        for name, selector in PARTS.items():
            if page.locator(selector).count():
                page.locator(selector).screenshot(path=arguments.out / f"{name}.png")
        browser.close()
    for path in arguments.out.glob("*.png"):
        shrink(path)
    return 0


def shrink(path: Path) -> None:
    from PIL import Image

    Image.open(path).convert("RGB").save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    raise SystemExit(main())
