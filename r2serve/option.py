"""Descriptions of options, and checks of option values."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from r2serve import cpus
from r2serve.errors import ConfigError

_LOG = logging.getLogger(__name__)

PREFIX = "R2CCL_"

_TRUE = ("on", "1", "true", "yes")
_FALSE = ("off", "0", "false", "no")

Value = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class Option:
    """The description of a configuration field: type, default, range and meaning."""

    name: str = ""
    kind: type[Value] = str
    default: Value = ""
    unit: str = ""
    meaning: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    power_of_two: bool = False
    window: bool = False
    """True: the text is a port or a range of ports."""
    cpus: bool = False
    """True: the text is a list of CPUs."""
    core: bool = False
    """True: the core uses the field, so ``config.hpp`` repeats the field."""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.kind is bool:
            return "on or off"
        if self.choices:
            return ", ".join(self.choices[:-1]) + f" or {self.choices[-1]}"
        if self.window:
            return "empty, a port, or a range of ports as in 40000-40050"
        if self.cpus:
            return "empty, or a list of CPUs as in 0-3,8"
        if self.low is None or self.high is None:
            return "text"
        noun = "a power of two" if self.power_of_two else _NOUN[self.kind]
        return f"{noun} from {show(self.kind(self.low))} to {show(self.kind(self.high))}"


_NOUN: dict[type[Value], str] = {int: "an integer", float: "a number"}


def show(value: Value) -> str:
    """Returns the value as text for an environment variable."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def option(default: Value, meaning: str, **details: Any) -> Any:
    """Makes a field of the table; ``details`` are further fields of :class:`Option`."""
    known = Option(kind=type(default), default=default, meaning=meaning, **details)
    return dataclasses.field(default=default, metadata={"option": known})


def core(default: Value, meaning: str, **details: Any) -> Any:
    """Makes a field of the table whose value the core receives as well."""
    return option(default, meaning, core=True, **details)


def complaint(name: str, value: object, right: str) -> str:
    """Returns an error text with the field, the variable, the value and the right values."""
    shown = repr(value) if isinstance(value, str) else value
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print huge integers
        shown = f"an integer of {value.bit_length()} bits"
    return worded(name, shown, right)


def worded(name: str, shown: object, right: str) -> str:
    """Returns the error text of :func:`complaint` for a value that is text for the user already."""
    return f"{name} ({PREFIX}{name.upper()}) is {shown}: must be {right}"


def parsed(option: Option, text: str) -> Value:
    """Converts the text of an environment variable into a value of the option."""
    text = text.strip()
    try:
        if option.kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if text.lower() in option.choices:  # LOG_LEVEL=INFO is as common as info
            return text.lower()
        return option.kind(text)
    except ValueError:
        raise ConfigError(complaint(option.name, text, option.allowed)) from None


def read_variables(
    table: Iterable[Option], environ: Mapping[str, str], overrides: Mapping[str, Value]
) -> dict[str, Any]:
    """Returns the values of the variables by option; ``overrides`` take precedence.

    An unknown variable with the prefix causes a warning with the closest known name.
    """
    known = {each.variable: each for each in table}
    values: dict[str, Any] = dict(overrides)
    for variable in sorted(v for v in environ if v.startswith(PREFIX)):
        if variable in known:
            meant = known[variable]
            if meant.name not in values:
                values[meant.name] = parsed(meant, environ[variable])
        else:
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            _LOG.warning("%s is not an option of r2serve and is ignored%s", variable, hint)
    return values


def checked(option: Option, value: object) -> Value:
    """Returns the value after a check of type and range.

    Raises:
        ConfigError: names field, value and allowed values.
    """
    error = ConfigError(complaint(option.name, value, option.allowed))
    if isinstance(value, int | float) and option.low is not None and option.high is not None:
        if not option.low <= value <= option.high:  # refuses NaN, too
            raise error
        if option.kind is float and type(value) is int:
            value = float(value)
    if type(value) is not option.kind:  # isinstance() would accept a bool as an int
        raise error
    if option.power_of_two and isinstance(value, int) and value.bit_count() != 1:
        raise error
    if option.choices and value not in option.choices:
        raise error
    if option.window and value and port_window(str(value)) is None:
        raise error
    if option.cpus and value and cpus.parsed(str(value)) is None:
        raise error
    assert isinstance(value, bool | int | float | str)
    return value


def port_window(text: str) -> tuple[int, int] | None:
    """Returns the first and last port of the option ``ports``; None: no port or range of ports."""
    first, dash, last = text.partition("-")
    ends = [first, last if dash else first]
    if not all(end.isascii() and end.isdecimal() and 1 <= int(end) <= 65535 for end in ends):
        return None
    low, high = int(ends[0]), int(ends[1])
    return (low, high) if low <= high else None
