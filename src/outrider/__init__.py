"""Outrider: an LLM inference engine built around speculative decoding.

This module is the whole public API.
"""

from outrider.config import EngineConfig, SamplingParams, SpeculativeConfig
from outrider.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutriderError,
    RequestError,
)
from outrider.llm import LLM
from outrider.output import RequestOutput
from outrider.trace import Origin, RoundTrace, SpeculationStats, TokenOrigin

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "Origin",
    "OutriderError",
    "RequestError",
    "RequestOutput",
    "RoundTrace",
    "SamplingParams",
    "SpeculationStats",
    "SpeculativeConfig",
    "TokenOrigin",
]
