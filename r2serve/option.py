"""What is known of an option, apart from its value, and what values it takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from r2serve.errors import ConfigError

PREFIX = "R2CCL_"

_TRUE = ("on", "1", "true", "yes")
_FALSE = ("off", "0", "false", "no")

Value = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of one field, apart from its value."""

    name: str = ""
    kind: type[Value] = str
    default: Value = ""
    unit: str = ""
    meaning: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    power_of_two: bool = False
    core: bool = False
    """The core acts on it, so ``config.hpp`` has it too."""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """What values are right, in words."""
        if self.kind is bool:
            return "on or off"
        if self.choices:
            return ", ".join(self.choices[:-1]) + f" or {self.choices[-1]}"
        if self.low is None or self.high is None:
            return "text"
        noun = "a power of two" if self.power_of_two else _NOUN[self.kind]
        return f"{noun} from {show(self.kind(self.low))} to {show(self.kind(self.high))}"


_NOUN: dict[type[Value], str] = {int: "an integer", float: "a number"}


def show(value: Value) -> str:
    """The value as it would be written in an environment variable."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def option(default: Value, meaning: str, **details: Any) -> Any:
    """A field of the table."""
    known = Option(kind=type(default), default=default, meaning=meaning, **details)
    return dataclasses.field(default=default, metadata={"option": known})


def core(default: Value, meaning: str, **details: Any) -> Any:
    """A field that the core has too."""
    return option(default, meaning, core=True, **details)


def complaint(name: str, value: object, right: str) -> str:
    shown = repr(value) if isinstance(value, str) else value
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print the largest
        shown = f"an integer of {value.bit_length()} bits"
    return f"{name} ({PREFIX}{name.upper()}) is {shown}: must be {right}"


def parsed(option: Option, text: str) -> Value:
    """The value that an environment variable's text stands for."""
    text = text.strip()
    try:
        if option.kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        return option.kind(text)
    except ValueError:
        raise ConfigError(complaint(option.name, text, option.allowed)) from None


def checked(option: Option, value: object) -> Value:
    """The value, if its type and range are right."""
    error = ConfigError(complaint(option.name, value, option.allowed))
    if isinstance(value, int | float) and option.low is not None and option.high is not None:
        if not option.low <= value <= option.high:  # nor is NaN
            raise error
        if option.kind is float and type(value) is int:
            value = float(value)
    if type(value) is not option.kind:  # not isinstance: a bool is no int here
        raise error
    if option.power_of_two and isinstance(value, int) and value.bit_count() != 1:
        raise error
    if option.choices and value not in option.choices:
        raise error
    assert isinstance(value, bool | int | float | str)
    return value
