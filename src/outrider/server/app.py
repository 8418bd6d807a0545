"""The ASGI application: routes, errors, and what stands before them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata

from fastapi import FastAPI
from starlette.types import ASGIApp

from outrider.server.errors import add_handlers
from outrider.server.middleware import ApiKeys, BodyLimit, RequestLog
from outrider.server.options import ServerOptions
from outrider.server.page import router as page_router
from outrider.server.routes import router
from outrider.server.service import Service

OPEN_PATHS = ("/", "/health", "/health/ready")
"""Paths that need no key: they tell nothing but whether the server runs, and show an empty page."""

_QUIET_PATHS = ("/health", "/health/ready", "/metrics")


def build_app(service: Service) -> ASGIApp:
    """The application around a service."""
    # Without /docs: those pages load scripts from elsewhere. /openapi.json describes everything.
    app = FastAPI(title="Outrider", version=_version(), docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.include_router(page_router)
    add_handlers(app)
    guarded = ApiKeys(BodyLimit(app, service.draining), api_keys(service.options), OPEN_PATHS)
    return RequestLog(guarded, _QUIET_PATHS)


def api_keys(options: ServerOptions) -> Sequence[str]:
    """From the options and from OUTRIDER_API_KEY."""
    stored = os.environ.get("OUTRIDER_API_KEY", "").split(",")
    return [*options.api_key, *(key.strip() for key in stored if key.strip())]


def _version() -> str:
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "0"
