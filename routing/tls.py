"""TLS around links and around the gateway's API: files in, contexts out, made anew when the files change.

It is an outer layer: who a peer is, the inner session proves. So certificates are checked against a CA, and against
no host name: members are dialled by addresses that gossip tells. Knows nothing of connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from routing.describing import describe
from routing.errors import SettingsError
from routing.tls_files import TlsFiles, check_ca, check_own, stamp_of

logger = logging.getLogger(__name__)

POLL_S: Final = 10.0  # how often the files are looked at; whoever renews does it weeks before the end
SETTLE_S: Final = 1.0  # certificate and key are replaced one after the other
REMIND_S: Final = 24 * 3600.0
LATE: Final = 0.1  # of a certificate's lifetime: renewal is due long before so little is left
# Authenticated encryption with forward secrecy, of TLS 1.2; those of TLS 1.3 are all of that kind.
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"


@dataclass(frozen=True, slots=True)
class Contexts:
    """What connections that begin now use. None: plain."""

    accept: ssl.SSLContext | None = None
    dial: ssl.SSLContext | None = None
    lifetime: tuple[float, float] | None = None  # of our certificate, unix time


class Tls:
    """The contexts of now. Raises `SettingsError`, in the flags' words, where a file will not do."""

    def __init__(self, files: TlsFiles, make: Callable[[TlsFiles], Contexts]) -> None:
        self.files = files
        self._make = make
        self._stamp = stamp_of(files)
        self._reminded_at = 0.0
        self.contexts = make(files)
        self._remind()

    async def watch(self, poll_s: float = POLL_S, settle_s: float = SETTLE_S) -> None:
        """Take in files that change, until cancelled. Connections that are open go on as they are."""
        while True:
            await asyncio.sleep(poll_s)
            if (stamp := stamp_of(self.files)) != self._stamp:
                while True:
                    await asyncio.sleep(settle_s)
                    if stamp == (stamp := stamp_of(self.files)):
                        break
                self._stamp = stamp
                self.reload()
            self._remind()

    def reload(self) -> None:
        """Read the files again; where they will not do, those from before stay in use."""
        try:
            self.contexts = self._make(self.files)
        except SettingsError as error:
            logger.error("%s; the files from before stay in use", error)  # noqa: TRY400 - the text says it all
        except Exception as error:  # whatever a file in the making holds: what runs does not end for it
            logger.error("the TLS files cannot be read: %s", describe(error))  # noqa: TRY400 - its text may quote
        else:
            self._reminded_at = 0.0
            logger.info("the TLS files were read again: connections from now on use them")

    def _remind(self) -> None:
        """Say once a day that our certificate is about to end, or has ended."""
        if self.contexts.lifetime is None or time.time() < self._reminded_at + REMIND_S:
            return
        since, until = self.contexts.lifetime
        left_s = until - time.time()
        if left_s < LATE * (until - since):
            self._reminded_at = time.time()
            when = f"expires in {left_s / 3600:.1f} hours" if left_s > 0 else "has expired: others refuse it"
            logger.warning("the certificate of --tls-cert %s %s: renew it", self.files.cert, when)


def member_tls(files: TlsFiles) -> Tls | None:
    """TLS of a node or sentinel: it listens and dials by wss, or plainly where no file is given.

    With a CA it asks everybody for a certificate of it; without one it asks nobody, and verifies those that it dials
    by the authorities that the system trusts.
    """
    if files == TlsFiles():
        return None
    if files.cert is None:
        raise SettingsError(
            "--tls-ca: a member that listens needs a certificate of its own too: give --tls-cert and --tls-key"
        )
    return Tls(files, _member_contexts)


def guest_tls(files: TlsFiles) -> Tls | None:
    """TLS of one that only dials: a gateway, or a command that asks. By wss where there is a CA, plainly otherwise.

    Its certificate is shown where it is of that CA.
    """
    return None if files.ca is None else Tls(files, _guest_contexts)


def https_tls(files: TlsFiles) -> Tls | None:
    """TLS of an HTTP server, which asks nobody for a certificate."""
    return None if files.cert is None and files.key is None else Tls(files, _https_contexts)


def _member_contexts(files: TlsFiles) -> Contexts:
    lifetime = check_own(files)
    contexts = Contexts(_accepting(files), _dialling(files), lifetime)
    if files.ca is not None:
        try:
            _try(contexts)
        except ssl.SSLError as error:
            raise SettingsError(f"--tls-cert {files.cert}: {_unfit(error)}") from error
    return contexts


def _guest_contexts(files: TlsFiles) -> Contexts:
    if files.cert is None and files.key is None:
        return Contexts(dial=_dialling(files))
    lifetime = check_own(files)
    try:
        _try(Contexts(_accepting(files), _dialling(files)), is_server_trusted=True)
    except ssl.SSLError as error:
        logger.warning("--tls-cert %s is not shown to nodes and sentinels: %s", files.cert, _unfit(error))
        return Contexts(dial=_dialling(TlsFiles(ca=files.ca)))
    return Contexts(dial=_dialling(files), lifetime=lifetime)


def _https_contexts(files: TlsFiles) -> Contexts:
    lifetime = check_own(files)
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return Contexts(accept=context, lifetime=lifetime)


def _accepting(files: TlsFiles) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, files)
    context.num_tickets = 0  # nobody resumes: a link lasts
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, files.ca)
    return context


def _dialling(files: TlsFiles) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT, files)
    context.check_hostname = False  # see the top
    if files.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _trust(context, files.ca)
    return context


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends of a link are ours
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if files.cert is not None and files.key is not None:
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_password)
        except (ssl.SSLError, OSError) as error:  # `check_own` has found nothing: it was replaced meanwhile
            raise SettingsError(f"--tls-cert {files.cert}, --tls-key {files.key}: {error}") from error
    return context


def _no_password() -> str:
    """Keep OpenSSL from asking on the terminal."""
    return ""


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    check_ca(ca)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate CA alone will do
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"--tls-ca {ca}: {error}") from error


def _try(contexts: Contexts, *, is_server_trusted: bool = False) -> None:
    """Shake hands with ourselves in memory: whoever has our files would accept our certificate, on either side.

    `is_server_trusted`: only what is shown as a client matters.
    """
    assert contexts.accept is not None
    assert contexts.dial is not None
    if is_server_trusted:
        contexts.dial.verify_mode = ssl.CERT_NONE
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        contexts.dial.wrap_bio(back, there, server_side=False),
        contexts.accept.wrap_bio(there, back, server_side=True),
    )
    for _ in range(4):  # flights, and some
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def _unfit(error: ssl.SSLError) -> str:
    """Why others with the same CA would refuse our certificate."""
    found = getattr(error, "verify_message", None) or error.reason or str(error)
    if "purpose" in found:
        return (
            "members show it both to those they dial and to those who dial them, but its extended key usage does not "
            "allow both: make one with serverAuth and clientAuth"
        )
    return (
        f"it is not one that --tls-ca vouches for ({found}): make it with that CA, with the chain in the file"
    )
