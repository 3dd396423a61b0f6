"""Secrets of pairs of processes: from public keys, and from the pre-shared key if there is one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from r2serve.errors import ConfigError
from r2serve.ports.info import ProcessInfo
from r2serve.ports.keys import KeyPair, check_confirmation, confirmation

KEY = b"k" * 32
ORDER_8 = "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"
"""A point of order 8: the shared secret is 0 for every private key."""


def process(number: int, keys: KeyPair, pre_shared: bytes = b"") -> ProcessInfo:
    tag = confirmation(pre_shared, number, keys.public)
    return ProcessInfo(number, keys.public, "node", f"host{number}", (), None, "", confirmation=tag)


@pytest.fixture
def keys() -> tuple[KeyPair, KeyPair, KeyPair]:
    return KeyPair(), KeyPair(), KeyPair()


def test_both_ends_have_the_same_secret_and_pairs_have_different_ones(
    keys: tuple[KeyPair, KeyPair, KeyPair],
) -> None:
    infos = [process(number, each) for number, each in enumerate(keys, 1)]
    found = {}
    for one in range(3):
        for other in range(3):
            if one != other:
                found[one, other] = keys[one].pair_secret(infos[one], infos[other])
    assert all(found[one, other] == found[other, one] for one, other in found)
    assert len(set(found.values())) == 3
    assert {len(secret) for secret in found.values()} == {32}


def test_the_pre_shared_key_enters_the_secret(keys: tuple[KeyPair, KeyPair, KeyPair]) -> None:
    one, other = process(1, keys[0]), process(2, keys[1])
    secrets = {keys[0].pair_secret(one, other, key) for key in (b"", KEY, b"l" * 32)}
    assert len(secrets) == 3
    assert keys[1].pair_secret(other, one, KEY) == keys[0].pair_secret(one, other, KEY)


def test_the_numbers_of_the_processes_enter_the_secret(
    keys: tuple[KeyPair, KeyPair, KeyPair],
) -> None:
    """A key that is told under another number leads to another secret."""
    one, other = process(1, keys[0]), process(2, keys[1])
    renumbered = replace(other, process=3)
    assert keys[0].pair_secret(one, other) != keys[0].pair_secret(one, renumbered)


def test_nothing_told_to_peers_derives_the_secret(keys: tuple[KeyPair, KeyPair, KeyPair]) -> None:
    """An observer has all that was told, and a key pair of its own, and no secret of the pair."""
    one, other = process(1, keys[0]), process(2, keys[1])
    told = json.dumps([one.to_wire(), other.to_wire()])
    for private in (keys[0]._private, keys[1]._private):
        assert private.private_bytes_raw().hex() not in told
    seen = [ProcessInfo.from_wire(each) for each in json.loads(told)]
    secret = keys[0].pair_secret(one, other)
    assert keys[2].pair_secret(*seen) != secret
    assert keys[2].pair_secret(seen[1], seen[0]) != secret


@pytest.mark.parametrize("key", [b"", KEY])
def test_processes_with_the_same_key_or_without_one_agree(
    keys: tuple[KeyPair, KeyPair, KeyPair], key: bytes
) -> None:
    one, other = process(1, keys[0], key), process(2, keys[1], key)
    told = ProcessInfo.from_wire(json.loads(json.dumps(other.to_wire())))
    check_confirmation(one, told, key)
    check_confirmation(other, one, key)


@pytest.mark.parametrize(
    ("own", "theirs", "what"),
    [
        (KEY, b"l" * 32, "hosts host1 and host2 have different keys"),
        (KEY, b"", "host host2 has no key, and host host1 has one"),
        (b"", KEY, "host host1 has no key, and host host2 has one"),
    ],
)
def test_different_pre_shared_keys_are_told_with_option_and_hosts(
    keys: tuple[KeyPair, KeyPair, KeyPair], own: bytes, theirs: bytes, what: str
) -> None:
    one, other = process(1, keys[0], own), process(2, keys[1], theirs)
    with pytest.raises(ConfigError) as raised:
        check_confirmation(one, other, own)
    text = str(raised.value)
    assert text.startswith(f"secret_file (R2CCL_SECRET_FILE): {what}; must be ")
    for key in filter(None, (own, theirs)):
        assert key.decode() not in text
        assert key.hex() not in text


@pytest.mark.parametrize("taken", ["public_key", "process", "neither"])
def test_a_confirmation_is_of_one_process_alone(
    keys: tuple[KeyPair, KeyPair, KeyPair], taken: str
) -> None:
    """A tag that is told with another key or number, or that is no ASCII, confirms nothing."""
    one, other = process(1, keys[0], KEY), process(2, keys[1], KEY)
    changed = {
        "public_key": replace(other, public_key=keys[2].public),
        "process": replace(other, process=3),
        "neither": replace(other, confirmation="ß" * 64),
    }[taken]
    with pytest.raises(ConfigError, match="have different keys"):
        check_confirmation(one, changed, KEY)


def test_every_process_has_its_own_keys_and_shows_no_private_key() -> None:
    one, other = KeyPair(), KeyPair()
    assert one.public != other.public
    assert one._private.private_bytes_raw().hex() not in repr(one)
    assert isinstance(one._private, X25519PrivateKey)


@pytest.mark.parametrize("point", ["00" * 32, "01" + "00" * 31, ORDER_8])
def test_a_point_without_a_secret_is_an_error(
    keys: tuple[KeyPair, KeyPair, KeyPair], point: str
) -> None:
    one = process(1, keys[0])
    other = replace(process(2, keys[1]), public_key=bytes.fromhex(point))
    with pytest.raises(ConfigError, match=rf"public_key of host host2: {point} is no X25519"):
        keys[0].pair_secret(one, other)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (None, "public_key is None"),
        ("", "public_key is ''"),
        ("ab" * 31, "must be 32 bytes as 64 hexadecimal digits"),
        ("ab" * 33, "must be 32 bytes as 64 hexadecimal digits"),
        ("zz" * 32, "must be 32 bytes as 64 hexadecimal digits"),
        (7, "public_key is 7"),
        ({"a": "b" * 4000}, "bbb...;"),
    ],
)
def test_a_malformed_public_key_is_named(told: Any, shown: str) -> None:
    wire = process(1, KeyPair()).to_wire() | {"public_key": told}
    with pytest.raises(ValueError, match="public_key is ") as raised:
        ProcessInfo.from_wire(wire)
    assert shown in str(raised.value)
    assert len(str(raised.value)) < 200


def test_without_the_package_an_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"rails need the package cryptography: .* '\.\[torch\]'"
    ):
        KeyPair()
