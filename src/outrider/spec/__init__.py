"""Speculation: how to draft, how long, and which drafts survive."""
