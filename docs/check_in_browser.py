"""Opens the built site in a browser: python docs/check_in_browser.py site

Every page is opened at the width of a telephone and of a desk, in the light and in the dark theme. A page fails where
it is wider than its window, where the console has an error, where a file is missing, or where the rules of WCAG 2.1 AA
that axe-core can judge are broken, the contrast of text among them. Then the search is asked for some words.

It needs Chromium and two packages, and is no part of the checks that run by themselves:

    pip install playwright axe-playwright-python
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = (390, 1280)
THEMES = ("light", "dark")
# Without its own copies of style sheets, whose relative addresses lead nowhere.
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}, "preload": False}
# Pages of single names have one form; a few of them stand for all.
NAMES, OF_NAMES = "made/api/names/", 8
SEARCHES = ("laplace", "predictive", "R-hat", "horseshoe")


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A browser that leaves a page early breaks the connection."""


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Only faults are printed."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder that is served for as long as the block runs."""
    server = Server(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def pages_of(site: Path, every: bool) -> list[str]:
    """The pages of a site, without the sources that some of them show; of single names a few, evenly chosen."""
    paths = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    paths = [path for path in paths if not path.startswith(("_modules/", "_static/"))]
    names = [path for path in paths if path.startswith(NAMES)]
    kept = set(names if every else names[:: max(1, len(names) // OF_NAMES)])
    return [path for path in paths if not path.startswith(NAMES) or path in kept]


def faults_of(page: Any, axe: Any, address: str) -> list[str]:
    """What is wrong with a page that is opened now."""
    found: list[str] = []
    page.on("console", lambda said: found.append(f"console: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: found.append(f"script: {error}"))
    page.on("requestfailed", lambda request: found.append(f"not loaded: {request.url}"))
    page.on(
        "response", lambda answer: found.append(f"missing: {answer.url}") if answer.status >= 400 else None
    )
    page.goto(address, wait_until="load")
    width = page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    if width > 0:
        found.append(f"{width} pixels wider than the window")
    for violation in axe.run(page, options=RULES).response["violations"]:
        first = violation["nodes"][0]
        found.append(
            f"{violation['id']} ({len(violation['nodes'])} times): {first['html'][:160]}; "
            f"{first['failureSummary'].splitlines()[-1].strip()}"
        )
    return found


def main(site: Path, every: bool, only: str) -> int:
    """Print what is wrong, page by page; the number of pages with faults."""
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    axe, faulty, opened = Axe(), 0, 0
    browser_at = shutil.which("chromium") or shutil.which("google-chrome")
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_at, args=["--no-sandbox"])
        for width in WIDTHS:
            for theme in THEMES:
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
                for path in pages_of(site, every):
                    if only not in path:
                        continue
                    page = context.new_page()
                    faults = faults_of(page, axe, f"{address}/{path}")
                    page.close()
                    opened += 1
                    faulty += bool(faults)
                    for fault in dict.fromkeys(faults):
                        print(f"{path} at {width}, {theme}: {fault}", flush=True)
                context.close()
        page = browser.new_page()
        for words in SEARCHES:
            page.goto(f"{address}/search.html?q={words}")
            page.wait_for_selector("#search-results li", timeout=20_000)
            print(f"search for {words}: {page.locator('#search-results li').count()} results or more")
        browser.close()
    print(f"{faulty} of {opened} pages with faults")
    return faulty


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", type=Path, help="the folder that sphinx-build wrote")
    parser.add_argument("--every", action="store_true", help="all pages of single names, not a few of them")
    parser.add_argument("--only", default="", help="pages whose path has this text")
    given = parser.parse_args()
    sys.exit(bool(main(given.site, given.every, given.only)))
