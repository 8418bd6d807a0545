"""The HTTP server: OpenAI's API in one process, the engine in another, joined by `AsyncLLM`.

Needs the packages of the extra `server`; only `options` can be imported without them.
"""
