"""Errors say what, got, allowed and what to do, and survive a trip between processes."""

import pickle

import pytest

from outrider.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OutriderError,
    RequestError,
)

KINDS = [ConfigError, CheckpointError, RequestError, CapacityError]


@pytest.mark.parametrize("kind", KINDS)
def test_message_is_made_of_the_parts_in_order(kind: type[OutriderError]) -> None:
    error = kind("top_p", got=1.5, allowed="(0, 1]", hint="1 keeps all tokens")
    assert str(error) == "top_p: got 1.5; allowed: (0, 1]; 1 keeps all tokens"
    assert (error.what, error.got, error.allowed, error.hint) == (
        "top_p",
        1.5,
        "(0, 1]",
        "1 keeps all tokens",
    )


def test_parts_that_are_not_given_do_not_appear() -> None:
    assert str(ConfigError("no room")) == "no room"
    assert str(ConfigError("no room", hint="make some")) == "no room: make some"
    assert not ConfigError("no room").has_got


def test_none_is_a_value_that_can_be_got() -> None:
    error = ConfigError("model", got=None)
    assert str(error) == "model: got None"
    assert error.has_got and error.got is None


def test_allowed_values_are_listed() -> None:
    assert str(ConfigError("x", allowed=("a", "b"))) == "x: allowed: a, b"


def test_long_values_are_cut_in_the_message_and_kept_in_the_attribute() -> None:
    error = RequestError("prompt", got="a" * 5000)
    assert len(str(error)) < 250
    assert error.got == "a" * 5000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [{}, {"got": None}, {"got": 3, "allowed": "4", "hint": "add 1"}])
def test_errors_pickle_with_type_message_and_parts(
    kind: type[OutriderError], parts: dict[str, object]
) -> None:
    error = kind("count", **parts)  # pyright: ignore[reportArgumentType]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_user_errors_are_value_errors_and_capacity_is_a_runtime_error() -> None:
    assert all(issubclass(kind, ValueError) for kind in KINDS[:3])
    assert issubclass(CapacityError, RuntimeError)
    assert not issubclass(CapacityError, ValueError)
