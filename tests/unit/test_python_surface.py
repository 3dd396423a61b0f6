"""The Python interface accepts any input, or refuses it with the name of the field."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import re
import struct
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from r2serve import tensors
from r2serve.cli import main
from r2serve.communicator import Communicator
from r2serve.config import Config, options
from r2serve.errors import ConfigError, InvalidArgumentError
from r2serve.observe import journal
from r2serve.option import PREFIX, Option
from r2serve.ports import netlink
from r2serve.ports.choice import choose
from r2serve.ports.identity import node_identity
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.ports.interfaces import Interface
from r2serve.ports.pairing import rails_between
from r2serve.sim import cli as sim_cli

# Every run uses the same examples; the tests do not measure time.
fuzz = settings(
    derandomize=True,
    deadline=None,
    max_examples=200,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = [option.name for option in options()]

# ---- options ----

numbers = st.one_of(st.integers(), st.floats(), st.integers(300, 5000).map(lambda n: 10**n))
LIKELY = (
    "0 1 -1 on off auto 1e3 nan inf 4096 65536 eth0,eth1 1_000 0x10 \u00b2 \u0661 per-rank / /proc"
)
likely = st.sampled_from([*LIKELY.split(" "), "", " 8 ", "a\0b", "\udc80", "9" * 400])
texts = st.one_of(likely, st.text(max_size=40), st.integers().map(str), st.floats().map(str))


def valid(config: Config) -> None:
    """Asserts that the values fit the option table, and that a second reading is equal."""
    values: dict[str, Any] = {}
    for option, value in config.describe():
        values[option.name] = value
        assert type(value) is option.kind
        if option.low is not None and option.high is not None:
            assert isinstance(value, int | float)
            assert option.low <= value <= option.high
        if option.choices:
            assert value in option.choices
    assert config.slot_bytes % config.chunk_bytes == 0
    assert Config(**values) == config


def begins(error: Exception, words: str) -> None:
    """Asserts that the error message starts with the given pattern."""
    assert re.match(words, str(error)), error


def names_a_field(error: ConfigError, given_fields: set[str]) -> None:
    named = re.match(r"(\w+) \(R2CCL_(\w+)\) is ", str(error))
    assert named is not None, error
    assert named[1].upper() == named[2]
    assert named[1] in NAMES
    # A rule across fields may name a field with its default value.
    assert given_fields


@fuzz
@given(st.dictionaries(st.sampled_from(NAMES), texts, max_size=6))
def test_any_text_in_the_environment(values: dict[str, str]) -> None:
    environ = {PREFIX + name.upper(): text for name, text in values.items()}
    try:
        valid(Config.from_env(environ))
    except ConfigError as error:
        names_a_field(error, set(values))


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
@settings(fuzz, max_examples=40)
@given(text=texts)
def test_any_text_in_each_variable(option: Option, text: str) -> None:
    try:
        valid(Config.from_env({option.variable: text}))
    except ConfigError as error:
        names_a_field(error, {option.name})


@fuzz
@given(st.text(max_size=30), st.text(max_size=10))
def test_any_other_variable_only_logs_a_warning(name: str, text: str) -> None:
    variable = PREFIX + name
    if variable not in {option.variable for option in options()}:
        assert Config.from_env({variable: text, name: text}) == Config()


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.one_of(numbers, st.booleans(), texts, st.none(), st.binary(), st.lists(st.integers())),
        max_size=4,
    )
)
def test_any_keyword(values: dict[str, Any]) -> None:
    try:
        valid(Config(**values))
    except ConfigError as error:
        names_a_field(error, set(values))


@fuzz
@given(st.data())
def test_values_within_their_ranges(data: st.DataObject) -> None:
    """Each value is valid on its own, or breaks a rule across fields."""
    option = data.draw(st.sampled_from([o for o in options() if o.low is not None]))
    assert option.low is not None
    assert option.high is not None
    value: Any
    if option.kind is int:
        value = data.draw(st.integers(int(option.low), int(option.high)))
    else:
        value = data.draw(st.floats(option.low, option.high))
    try:
        valid(Config(**{option.name: value}))
    except ConfigError as error:
        names_a_field(error, {option.name})


# These values once raised other exceptions.
FOUND: dict[str, dict[str, Any]] = {
    "an integer beyond every float": {"slots": 10**400},
    "a number beyond every float": {"link_timeout_s": 10**400},
    "an integer too long to print": {"slots": 10**5000},
    "not a number": {"link_timeout_s": float("nan")},
    "a path with a null byte": {"journal_dir": "a\0b"},
    "a path without an encoding": {"journal_dir": "\ud800"},
}


@pytest.mark.parametrize("case", FOUND)
def test_values_that_once_raised_other_errors(case: str) -> None:
    (name,) = FOUND[case]
    with pytest.raises(ConfigError, match=rf"^{name} \(R2CCL_{name.upper()}\) is .*: must be "):
        Config(**FOUND[case])


# ---- the journal ----


def a_journal(rails: int = 2, records: int = 5) -> bytes:
    sizes = (rails + 1, 1, 4, rails, 1, 0)
    header = struct.pack("<8s8IQqqq120x", b"R2JOURNL", journal.VERSION, 7, *sizes, records, 1, 2, 3)
    numbers = (0, 2, 0, 0, 1, 0, 1, 0, 1, 9, *range(9), 1, 0, 2)
    rail = b"".join(
        struct.pack(
            "<32s32s32sBBBBIBBBBIqQQQQQqqQBBB5x", b"rail%d" % i, b"rank 1", b"eth0", *numbers
        )
        for i in range(rails)
    )
    group = struct.pack("<32sQIIqQQQBB6x", b"tp:0", 1, 0, 2, 5, 0, 0, 0, 1, 0) + b"\1" * 9 * 216
    ring = [b"\0" * 56] * 4
    for number in range(1, records + 1):
        record = (number, number, 1 + number % 7, 1, 2, 0, number % 3, 1, 1, 2, 3, 4)
        ring[(number - 1) % 4] = struct.pack("<QqBBBBIIIQQQ", *record)
    return header + rail + b"\0" * 192 + group + b"".join(ring)


def parse(data: bytes) -> None:
    try:
        parsed = journal.parse(data)
    except journal.JournalError as error:
        begins(error, ".")
        return
    size = 192 * len(parsed.rails) + 2032 * len(parsed.groups) + 56 * len(parsed.events)
    assert size <= len(data)
    json.dumps(dataclasses.asdict(parsed))


def test_the_journal_before_mutation_is_valid() -> None:
    parsed = journal.parse(a_journal())
    assert len(parsed.rails) == 2
    assert len(parsed.groups) == 1
    assert len(parsed.events) == 4


@fuzz
@given(st.binary(max_size=400))
def test_a_journal_of_any_bytes(data: bytes) -> None:
    parse(data)
    parse(b"R2JOURNL\3\0\0\0" + data)


@fuzz
@given(st.integers(0, 3000))
def test_a_journal_cut_anywhere(size: int) -> None:
    parse(a_journal()[:size])


@fuzz
@given(st.lists(st.tuples(st.integers(8, 2900), st.binary(min_size=1, max_size=8)), max_size=8))
def test_a_journal_changed_anywhere(edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(a_journal())
    for at, change in edits:
        data[at : at + len(change)] = change
    parse(bytes(data))


# ---- interfaces and topology ----

addresses = st.one_of(
    st.ip_addresses(),
    st.sampled_from(["127.0.0.1", "10.0.0.1", "fe80::1", "::1", "224.0.0.1", "0.0.0.0"]).map(
        ipaddress.ip_address
    ),
)
names = st.one_of(
    st.sampled_from(
        ["lo", "eth0", "eth1", "eth10", "eth\u00b2", "\u00b2", "1\u00b2", "\u0661", "e=1"]
    ),
    st.text(min_size=1, max_size=15),
)
devices = st.lists(
    st.builds(
        Interface,
        name=names,
        index=st.integers(1, 9),
        up=st.booleans(),
        carrier=st.booleans(),
        loopback=st.booleans(),
        kind=st.sampled_from(["", "bridge", "veth"]),
        master=st.sampled_from(["", "eth0"]),
        master_kind=st.sampled_from(["", "bond", "vrf"]),
        addresses=st.lists(addresses, max_size=3).map(tuple),
    ),
    max_size=5,
    unique_by=lambda device: device.name,
)


@fuzz
@given(st.data(), devices)
def test_ports_of_any_specification(data: st.DataObject, there: list[Interface]) -> None:
    known = [device.name for device in there] + [str(a) for d in there for a in d.addresses]
    word = st.one_of(st.sampled_from([*known, "auto", ""]), names, addresses.map(str))
    entry = st.one_of(word, st.tuples(word, word).map("=".join), st.text(max_size=10))
    spec = data.draw(st.lists(entry, min_size=1, max_size=3).map(",".join))
    management = data.draw(st.one_of(st.just(""), word))
    engine = data.draw(st.one_of(st.none(), word))
    for rails in ("auto", spec):
        try:
            ports = choose(rails, management, engine, there).ports
        except ConfigError as error:
            begins(error, r"(rails|management) \(R2CCL_(RAILS|MANAGEMENT)\) is ")
            continue
        assert [port.name for port in ports] == [f"rail{i}" for i in range(len(ports))]
        assert len({(port.device, port.address) for port in ports}) == len(ports)
        for port in ports:
            ipaddress.ip_address(port.address)


def test_names_with_unicode_digits_are_sorted() -> None:
    there = [
        Interface(name=name, index=1, addresses=(ipaddress.ip_address(address),))
        for name, address in (("eth\u00b2", "10.0.0.1"), ("\u00b2", "10.0.0.2"))
    ]
    assert len(choose("auto", "", None, there).ports) == 2


@fuzz
@given(st.binary(max_size=200))
def test_any_answer_of_the_kernel_is_read_to_its_end(data: bytes) -> None:
    for _, _, payload in netlink._messages(data):
        assert len(payload) < len(data)
    for value in netlink._attributes(data).values():
        assert len(value) < len(data)


@fuzz
@given(st.text(max_size=20), st.integers(0, 1000))
def test_a_node_is_named_by_any_text(spec: str, rank: int) -> None:
    identity = node_identity(spec, rank)
    assert identity == node_identity(spec, rank)
    if spec and spec != "per-rank":
        assert identity == node_identity(spec, rank + 1)


ports = st.builds(PortInfo, st.text(max_size=8), st.text(max_size=8), st.integers(0, 65535))
processes = st.builds(
    ProcessInfo,
    process=st.integers(0, 2**32 - 1),
    public_key=st.binary(min_size=32, max_size=32),
    node=st.sampled_from(["a", "b"]),
    host=st.text(max_size=8),
    ports=st.lists(ports, max_size=4).map(tuple),
    control=st.none() | ports,
    unix_name=st.text(max_size=8),
)


@fuzz
@given(processes, processes)
def test_any_process_survives_the_store_and_has_rails_or_an_error(
    one: ProcessInfo, other: ProcessInfo
) -> None:
    assert ProcessInfo.from_wire(json.loads(json.dumps(one.to_wire()))) == one
    try:
        forth = rails_between(one, other, 0)
    except ConfigError as error:
        assert one.node != other.node
        begins(error, "R2CCL_RAILS: ")
        return
    back = rails_between(other, one, 1)
    assert [rail["kind"] for rail in forth] == [rail["kind"] for rail in back]


# ---- arguments of collectives ----


class Sent(Exception):
    """A call reached the core."""


class Core:
    """A fake core; a call to it has passed every check."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            for argument in arguments:
                sizes = argument if isinstance(argument, list) else [argument]
                assert all(type(size) is int and size >= 0 for size in sizes), (name, arguments)
            raise Sent

        return call


@pytest.fixture
def ranks() -> Communicator:
    """Rank 1 of 3, without peers."""
    made = Communicator.__new__(Communicator)
    made.rank, made.world_size = 1, 3
    made._core = Core()  # type: ignore[assignment]
    made._all_reduce = made._core.all_reduce
    return made


DTYPES = [*tensors.DTYPES, torch.complex64, torch.int16, torch.float8_e5m2]
shapes = st.lists(st.integers(0, 6), max_size=3)


@st.composite
def torch_tensors(draw: st.DrawFn) -> torch.Tensor:
    made = torch.zeros(draw(shapes), dtype=draw(st.sampled_from(DTYPES)))
    change = draw(st.sampled_from(["", "", "", "t", "half", "meta", "expand", "sparse", "grad"]))
    if change == "t" and made.dim() >= 2:
        return made.transpose(0, 1)
    if change == "half" and made.dim():
        return made[::2]
    if change == "meta":
        return made.to("meta")
    if change == "expand":
        return made.unsqueeze(0).expand(3, *made.shape)
    if change == "sparse" and made.dtype == torch.float32:
        return made.to_sparse()
    if change == "grad" and made.dtype == torch.float32:
        return made.requires_grad_()
    return made


@st.composite
def numpy_arrays(draw: st.DrawFn) -> Any:
    kinds = st.one_of(numpy_st.scalar_dtypes(), st.sampled_from([np.dtype(">f4"), np.dtype("f4")]))
    made = np.zeros(draw(shapes), draw(kinds))
    return made[::-1] if made.ndim and draw(st.booleans()) else made


arrays = st.one_of(torch_tensors(), numpy_arrays(), st.sampled_from([None, 1.0, [1, 2], "text"]))
words = st.one_of(st.sampled_from(["sum", "avg", "max", "xor", ""]), st.text(max_size=5))
roots = st.one_of(st.integers(-3, 5), st.integers())
counts = st.one_of(st.lists(st.integers(-1, 6), max_size=4), st.just([2, 2, 2]), st.just([1, 2, 3]))


@settings(fuzz, max_examples=400)
@given(data=st.data())
def test_any_argument_is_refused_or_reaches_the_core(
    ranks: Communicator, data: st.DataObject
) -> None:
    tensor: Any = data.draw(arrays)
    out: Any = data.draw(st.one_of(st.none(), arrays, st.just(tensor)))
    calls: list[Any] = [
        lambda: ranks.all_reduce(
            tensor, data.draw(words), out=out, algorithm=data.draw(st.none() | words)
        ),
        lambda: ranks.all_gather(tensor, out=out),
        lambda: ranks.all_gatherv(tensor, data.draw(counts), out=out),
        lambda: ranks.reduce_scatter(tensor, data.draw(words), out=out),
        lambda: ranks.reduce_scatterv(tensor, data.draw(counts), data.draw(words), out=out),
        lambda: ranks.gather(tensor, data.draw(st.integers(0, 2)), out=out),
        lambda: ranks.all_to_all(tensor, out=out),
        lambda: ranks.all_to_allv(tensor, data.draw(counts), data.draw(counts), out=out),
    ]
    with contextlib.suppress(Sent):
        try:
            data.draw(st.sampled_from(calls))()
        except InvalidArgumentError as error:
            begins(error, "(tensor|out|op|algorithm|sizes|in_sizes|out_sizes): ")


@pytest.mark.parametrize("array", [np.zeros(4, "f4")[::-1], np.zeros(4, ">f4")])
def test_arrays_that_torch_cannot_share_are_named(ranks: Communicator, array: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^tensor: "):
        ranks.all_reduce(array)


# ---- the command line ----

arguments = st.lists(
    st.one_of(
        st.sampled_from(["config", "sim", "--markdown", "--seed", "--seeds", "--jobs", "--", "-1"]),
        st.sampled_from(["--version", "--help", "-h", "0", "x", "--json", "/"]),
        st.text(max_size=8),
    ),
    max_size=4,
)


@fuzz
@given(arguments)
def test_any_command_line_ends_with_a_status(words: list[str]) -> None:
    # The commands are replaced: the test is about parsing the words.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim_cli, "_seeds", lambda *_: True)
        patch.setattr(sim_cli, "_mutants", lambda *_: True)
        result = CliRunner().invoke(main, words)
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
