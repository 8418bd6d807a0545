"""Pages that ship with the package. Knows neither what they show nor who sends them."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

_PART = re.compile(r"/\* ([\w.]+\.(?:css|js)) \*/|<!-- ([\w.]+\.html) -->")
"""Where a page has the text of another file of the folder."""


def page(name: str) -> str:
    """A page of the folder `web` as one document: what it shares is put in its places."""
    folder = resources.files("outrider").joinpath("web")

    def text(part: str) -> str:
        return folder.joinpath(part).read_text(encoding="utf-8")

    return _PART.sub(lambda place: text(place[1] or place[2]), text(name))


def content_policy(text: str, connects: str = "'none'") -> str:
    """A Content-Security-Policy: the page's own script and style, and nothing from elsewhere.

    Args:
        text: the page.
        connects: where its script may send requests.
    """
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    parts = {
        "default-src": "'none'",
        "script-src": " ".join(map(_digest, scripts)) or "'none'",
        "style-src": " ".join(map(_digest, styles)) or "'none'",
        "connect-src": connects,
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _digest(text: str) -> str:
    """As a browser computes it for an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
