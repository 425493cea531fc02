"""Certificates for the tests of TLS: a CA, and files of what it signs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme

from routing.tls_files import TlsFiles


class Authority:
    """A CA with its file."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.path = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.path)

    def files(self, name: str, **options: Any) -> TlsFiles:
        """Certificate and key of a member, made here; `options` are trustme's. Written again, they are renewed."""
        made = self._ca.issue_cert(f"{name}.example", "127.0.0.1", **options)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        key.unlink(missing_ok=True)
        key.touch(0o600)
        made.private_key_pem.write_to_path(key)
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return TlsFiles(cert, key, self.path)

    def expired(self, name: str) -> TlsFiles:
        """Files of a member whose certificate ended yesterday."""
        now = datetime.now(UTC)
        return self.files(name, not_before=now - timedelta(days=9), not_after=now - timedelta(days=1))
