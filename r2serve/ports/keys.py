"""Keys of a pair of processes: X25519, with the pre-shared key of the job if there is one.

Each process has a key pair for its lifetime, and peers exchange public keys alone. An observer of
the exchange therefore does not learn the secret of a pair. A process that changes the
exchange does not know the pre-shared key, on which the secret depends, too.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from r2serve.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from r2serve.ports.info import ProcessInfo

_LABEL = b"r2ccl pair secret\n"
_CONFIRMATION_LABEL = b"r2ccl key confirmation\n"
"""No other HMAC under the pre-shared key covers a text whose first line is this."""


class KeyPair:
    """The X25519 keys of a process. The private key has no text form and stays in the process."""

    def __init__(self) -> None:
        """Draws the keys.

        Raises:
            ModuleNotFoundError: the package cryptography is missing: a node that only watches needs
                no keys, and has no such package.
        """
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ModuleNotFoundError as error:
            text = f"rails need the package cryptography: {how_to_install('torch')}"
            raise ModuleNotFoundError(text, name=error.name) from error
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        """The public key, 32 bytes."""

    def pair_secret(self, own: ProcessInfo, peer: ProcessInfo, pre_shared: bytes = b"") -> bytes:
        """Returns the secret of this process and a peer: 32 bytes, equal at both ends.

        The secret depends on both public keys and process numbers, and on ``pre_shared``.

        Raises:
            ConfigError: the peer's public key leads to no secret.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            theirs = X25519PublicKey.from_public_bytes(peer.public_key)
            shared = self._private.exchange(theirs)  # refuses points of small order (RFC 7748, 6.1)
        except ValueError as error:
            raise ConfigError(
                f"public_key of host {peer.host}: {peer.public_key.hex()} is no X25519 public key; "
                "must be 32 bytes of a process that runs the same release of r2serve"
            ) from error
        ends = sorted((info.process, info.public_key) for info in (own, peer))
        said = b"".join(process.to_bytes(8, "big") + public for process, public in ends)
        return HKDF(SHA256(), 32, salt=pre_shared or None, info=_LABEL + said).derive(shared)


def confirmation(pre_shared: bytes, process: int, public_key: bytes) -> str:
    """Returns a tag by which processes with the same pre-shared key know each other.

    The tag is bound to the process by its number and public key, and tells nothing of a random
    pre-shared key. Empty: no pre-shared key.
    """
    if not pre_shared:
        return ""
    said = _CONFIRMATION_LABEL + process.to_bytes(8, "big") + public_key
    return hmac.new(pre_shared, said, hashlib.sha256).hexdigest()


def check_confirmation(own: ProcessInfo, peer: ProcessInfo, pre_shared: bytes) -> None:
    """Compares the pre-shared keys of this process and a peer by the peer's tag.

    Without the comparison, no rail between both would authenticate, and the start would end after
    ``connect_timeout_s`` without the reason.

    Raises:
        ConfigError: the keys differ, or one of both processes has none.
    """
    expected = confirmation(pre_shared, peer.process, peer.public_key)
    if hmac.compare_digest(expected.encode(), peer.confirmation.encode()):
        return
    if not expected:
        what = f"host {own.host} has no key, and host {peer.host} has one"
    elif not peer.confirmation:
        what = f"host {peer.host} has no key, and host {own.host} has one"
    else:
        what = f"hosts {own.host} and {peer.host} have different keys"
    raise ConfigError(
        f"secret_file (R2CCL_SECRET_FILE): {what}; must be a file with the same key on every node"
    )
