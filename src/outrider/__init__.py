"""Outrider: an LLM inference engine built around speculative decoding.

This module is the whole public API.
"""

from outrider.batch import FinishReason, TokenLogprobs
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import (
    CapacityError,
    CheckpointError,
    ConcurrentCallError,
    ConfigError,
    OutriderError,
    RequestError,
)
from outrider.llm import LLM
from outrider.output import Completion, RequestOutput
from outrider.params import SamplingParams, StructuredOutput
from outrider.trace import Origin, PassTimes, RoundTrace, SpeculationStats, TokenOrigin

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConcurrentCallError",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "Origin",
    "OutriderError",
    "PassTimes",
    "RequestError",
    "RequestOutput",
    "RoundTrace",
    "SamplingParams",
    "SpeculationStats",
    "SpeculativeConfig",
    "StructuredOutput",
    "TokenLogprobs",
    "TokenOrigin",
]
