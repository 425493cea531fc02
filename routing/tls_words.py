"""What went wrong in a TLS handshake, in words that say which flag on which side mends it.

Pure: OpenSSL's reasons in, a `SecurityError` out.
"""

from __future__ import annotations

import ssl
from typing import Final

from routing.errors import ErrorCode, SecurityError

# What the peer says of us, by OpenSSL's name of its alert.
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "it asks for a certificate: give --tls-cert and --tls-key of its CA",
    "UNKNOWN_CA": "it does not accept our certificate, which is of another CA than its --tls-ca",
    "CERTIFICATE_EXPIRED": "it does not accept our certificate, which has expired or is not good yet",
    "BAD_CERTIFICATE": "it does not accept our certificate",
    "CERTIFICATE_REVOKED": "it does not accept our certificate, which was revoked",
    "UNSUPPORTED_CERTIFICATE": "it does not accept our certificate: serverAuth and clientAuth must be among its uses",
    "CERTIFICATE_UNKNOWN": "it does not accept our certificate",
    "PROTOCOL_VERSION": "it speaks no TLS 1.3",
    "HANDSHAKE_FAILURE": "it has no cipher in common with us",
}
# What we found in the peer's certificate, by X.509's number.
_EXPIRED, _NOT_YET, _PURPOSE = 10, 9, 26
_UNKNOWN: Final = frozenset({2, 18, 19, 20, 21})
_FOUND: Final = {
    _EXPIRED: "its certificate has expired: renew it there",
    _NOT_YET: "its certificate is not good yet: set the clocks of both machines",
    _PURPOSE: "its certificate is not for this use: make one there with serverAuth and clientAuth",
    **dict.fromkeys(_UNKNOWN, "its certificate is of another CA than our --tls-ca"),
}
_OTHERS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate: start it with --tls-cert and --tls-key of our CA",
    "UNSUPPORTED_PROTOCOL": "it speaks no TLS version that we do",
    "NO_SHARED_CIPHER": "it has no cipher in common with us",
    "NO_SUITABLE_SIGNATURE_ALGORITHM": "it cannot use our kind of key",
}


def told_by(error: ssl.SSLError) -> SecurityError:
    """Put OpenSSL's words into ours."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = _FOUND.get(error.verify_code, f"its certificate is not accepted ({error.verify_message})")
        return _failed(text)
    reason = error.reason or type(error).__name__
    alert = next((text for name, text in _ALERTS.items() if reason.endswith(f"ALERT_{name}")), None)
    return _failed(alert or _OTHERS.get(reason) or f"what it says is no TLS that is understood ({reason})")


def not_tls(first: bytes, *, is_server: bool) -> SecurityError:
    """What the first bytes of one say that should speak TLS and does not; none: it hung up."""
    if is_server:
        if not first:
            return _failed("it hung up")
        if first.startswith(b"GET "):
            return _failed(
                "it dials without TLS, and this member speaks nothing else: start it with --tls-ca"
            )
        return _failed("what it sent is not TLS")
    if not first:
        return _failed("it hung up; it may be started without --tls-cert")
    return _failed(
        "it speaks without TLS: start it with --tls-cert and --tls-key, or this side without --tls-ca"
    )


def dialled_with_tls() -> SecurityError:
    """What a plain listener says of one that begins to speak TLS."""
    return _failed(
        "it dials with TLS, which this member does not speak: start this one with --tls-cert, --tls-key"
    )


def wants_tls() -> SecurityError:
    """What a plain dialler says of a port that wants TLS."""
    return _failed(
        "it speaks TLS only: give --tls-ca with its CA, and --tls-cert, --tls-key where it asks for them"
    )


def _failed(text: str) -> SecurityError:
    return SecurityError(ErrorCode.TLS, text)
