"""A certificate authority for development, and certificates that it signs."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import ConfigError

ROLES = ("router", "prefill", "decode")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
VALID_DAYS = 365
AUTHORITY = "ca"
_BACKDATED = datetime.timedelta(minutes=5)  # for clocks that are a little behind


class CertificatePaths(NamedTuple):
    """Files of one certificate."""

    certificate: Path
    key: Path


def paths_of(directory: Path, name: str) -> CertificatePaths:
    """Returns the paths at which `make_certificates` puts the files of `name`."""
    return CertificatePaths(directory / f"{name}.pem", directory / f"{name}.key")


def make_certificates(directory: Path, hosts: Sequence[str] = (), *, force: bool = False) -> list[Path]:
    """Writes an authority and a certificate for each role, valid for this machine and `hosts`; returns the files.

    Raises ConfigError if one of them is there already, unless `force`, or cannot be written.
    """
    names = _alternative_names([*LOCAL_HOSTS, *hosts])
    files = [file for name in (AUTHORITY, *ROLES) for file in paths_of(directory, name)]
    if not force and (there := [file for file in files if file.exists()]):
        raise ConfigError(f"--dir: {there[0]} exists; --force replaces it", param="dir")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        authority = _Authority()
        _write(paths_of(directory, AUTHORITY), authority.certificate, authority.key)
        for role in ROLES:
            _write(paths_of(directory, role), *authority.sign(role, names))
    except OSError as error:
        raise ConfigError(f"--dir: cannot write to {directory}: {error.strerror}", param="dir") from error
    return files


class _Authority:
    """Signs certificates; its own key is in its file only."""

    def __init__(self) -> None:
        self.key = _new_key()
        self._name = _name("Baton development authority")
        self.certificate = (
            self._builder(self._name, self.key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def sign(
        self, common_name: str, names: x509.SubjectAlternativeName
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """A certificate for both ends of a connection: a decode pod serves routers and calls prefill pods."""
        key = _new_key()
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            self._builder(_name(common_name), key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(names, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate, key

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Raises ConfigError for a host that is neither an address nor a name."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not host or not host.isascii() or any(character in " /:,@" for character in host):
                raise ConfigError(f"--host: {host!r} is neither an address nor a name", param="host") from None
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _write(paths: CertificatePaths, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = serialization.Encoding.PEM
    encoded = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(paths.key, encoded, 0o600)
    _replace(paths.certificate, certificate.public_bytes(pem), 0o644)


def _replace(file: Path, content: bytes, mode: int) -> None:
    """A new file in the place of an old one, which may have had another mode."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(content)
