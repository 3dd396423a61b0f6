"""Keys of a pair of processes: X25519, with the pre-shared key of the job if there is one.

Each process has a key pair for its lifetime, and peers exchange public keys alone. An observer of
the exchange therefore does not learn the secret of a pair. A process that changes the
exchange does not know the pre-shared key, on which the secret depends, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from r2serve.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from r2serve.ports.info import ProcessInfo

_LABEL = b"r2ccl pair secret\n"


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
