"""What a user chooses for the server beside the engine. Imports no web framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.checks import as_tuple, check_host, check_int, check_real, check_text
from outrider.errors import ConfigError

_MOST_SECONDS = 1e7
"""Four months; the clocks of event loops and locks overflow at larger ones."""


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens and what it lets in.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which is printed.
        api_key: key that clients must send as a bearer token. Keys in the environment variable
            OUTRIDER_API_KEY, separated by commas, do not show in lists of processes.
        served_model_name: name of the model towards clients, in place of MODEL.
        max_waiting: sequences that may wait while max_num_seqs others run; requests beyond are
            answered with 429.
        request_timeout: seconds that a request may take, 0.1 or more; it is answered with 408 then.
            None sets no limit.
        drain_timeout: seconds that running requests are given when the server is told to end.

    Raises:
        ConfigError: a value is not allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Sequence[str] = field(default=(), repr=False)
    served_model_name: Sequence[str] = ()
    max_waiting: int = 256
    request_timeout: float | None = None
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        check_host(ConfigError, "host", self.host)
        check_int(ConfigError, "port", self.port, 0, 65535)
        keys = as_tuple(ConfigError, "api_key", self.api_key)
        if not all(isinstance(key, str) and key and key.isascii() for key in keys):
            raise ConfigError("api_key", allowed="ASCII text that is not empty")  # not shown
        object.__setattr__(self, "api_key", keys)
        names = as_tuple(ConfigError, "served_model_name", self.served_model_name)
        for name in names:
            check_text(ConfigError, "served_model_name", name)
        object.__setattr__(self, "served_model_name", names)
        check_int(ConfigError, "max_waiting", self.max_waiting, 0)
        for name in ("request_timeout", "drain_timeout"):
            value: float | None = getattr(self, name)
            if value is not None:
                check_real(ConfigError, name, value)
                if not 0.1 <= value <= _MOST_SECONDS:
                    allowed = f"from 0.1 to {_MOST_SECONDS:.0f} seconds"
                    raise ConfigError(name, got=value, allowed=allowed)
