"""`baton keys` and `baton certs`."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path

import pytest
from cryptography import x509

from cli.main import main
from router.security.keys import KeyTable, parse_key_file


def test_a_fresh_key_fits_the_entry_printed_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--name", "123"]) == 0
    first, entry = capsys.readouterr().out.splitlines()
    key = first.rpartition(" ")[2]
    found = KeyTable(parse_key_file(entry)).find(key)
    assert found is not None
    assert found.tenant.name == "123"
    assert key not in entry


def test_a_key_of_an_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--name", "ops", "--operator"]) == 0
    (key,) = parse_key_file(capsys.readouterr().out.splitlines()[1])
    assert key.is_operator


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["keys", "new", "--name", "a b"], "--name"),
        (["keys", "new"], "--name"),
        (["keys"], "COMMAND"),
        (["certs"], "--dir"),
        (["certs", "--dir", "{tmp}/new", "--host", "a b"], "--host: 'a b' is neither an address nor a name"),
        (["certs", "--dir", "/dev/null/x"], "--dir: cannot write to /dev/null/x"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format(tmp=tmp_path) for word in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


def test_certificates_are_private_and_name_their_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "certs"
    assert main(["certs", "--dir", str(directory), "--host", "pod-1", "--host", "10.0.0.7"]) == 0
    assert "--cluster-ca" in capsys.readouterr().out
    authority = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
    for role in ("router", "prefill", "decode"):
        certificate = x509.load_pem_x509_certificate((directory / f"{role}.pem").read_bytes())
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["localhost", "pod-1"]
        addresses = [ipaddress.ip_address(each) for each in ("127.0.0.1", "::1", "10.0.0.7")]
        assert names.get_values_for_type(x509.IPAddress) == addresses
    for key in directory.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_nothing_is_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "--dir", str(tmp_path)]) == 0
    before = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.key").chmod(0o644)
    assert main(["certs", "--dir", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "ca.key").read_bytes() == before
    assert main(["certs", "--dir", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "ca.key").read_bytes() != before
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
