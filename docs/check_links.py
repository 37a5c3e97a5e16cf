"""Checks that every link of the built site leads to a file of it, and every anchor to an element.

python docs/check_links.py site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of one page, and what it would load from a network."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        loads = given.get("src") if tag in ("img", "script") else given.get("href") if tag == "link" else None
        if loads and not loads.startswith("data:"):
            self.loaded.add(loads)
            self.links.add(loads)


def broken_links(folder: Path) -> list[str]:
    """What is wrong with the pages of a folder, a line each.

    Parameters
    ----------
    folder : Path
        A built site.

    Returns
    -------
    list of str
    """
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{path.relative_to(folder)} loads {link} from a network")
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{path.relative_to(folder)} links to {link}, which is no file")
            elif parts.fragment and target.suffix == ".html":
                known = pages[target].anchors if target in pages else Page(target).anchors
                if unquote(parts.fragment) not in known:
                    found.append(f"{path.relative_to(folder)} links to {link}, which has no such anchor")
    return found


if __name__ == "__main__":
    problems = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(problems) or "every internal link leads somewhere")
    raise SystemExit(bool(problems))
