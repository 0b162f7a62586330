"""TLS of commands that talk to an endpoint over HTTP."""

from __future__ import annotations

import ssl

from common.errors import ConfigError


def tls_context(tls_ca: str) -> ssl.SSLContext:
    """Trusts the authority in the PEM file of `--tls-ca`, or public ones if it is empty. Raises ConfigError if the file
    cannot be used."""
    try:
        return ssl.create_default_context(cafile=tls_ca or None)
    except OSError as error:  # SSLError is one
        raise ConfigError(f"--tls-ca: {tls_ca} cannot be used: {error.strerror}", param="tls_ca") from error


def tls_problem(error: ssl.SSLError) -> str:
    """Says what went wrong, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}; --tls-ca names the authority to trust"
    return f"{error.reason or error}; does it speak plain http?"
