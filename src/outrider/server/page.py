"""The live page at /: one document that needs nothing but this server."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from outrider.assets import content_policy, page

router = APIRouter(include_in_schema=False)

_PAGE = page("playground.html")
_POLICY = content_policy(_PAGE, connects="'self'")
_HEADERS = {
    "Content-Security-Policy": _POLICY + "; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def playground() -> Response:
    """A completion whose tokens show who chose them. It holds no data, so it needs no key."""
    return HTMLResponse(_PAGE, headers=_HEADERS)
