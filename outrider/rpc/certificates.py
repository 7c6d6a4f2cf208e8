"""Makes a development CA and a certificate for each role of a cluster. A real PKI can make these: see `tls.py`."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.errors import ConfigError
from outrider.rpc.drafter_ids import NAME as DRAFTER_NAME
from outrider.rpc.tls import DRAFTER, NAMES

CA_DAYS = 3650
COMMON_NAME_CHARACTERS = 64
DAYS = 30  # nothing revokes a certificate
CLIENT_FACING = ("router", "gateway")  # called by clients, which check the host name
LOCAL = ("localhost", "127.0.0.1", "::1")
CLOCK_SKEW = timedelta(minutes=5)  # certificates are valid a little before they were made, because clocks differ

Key = ec.EllipticCurvePrivateKey


def make(
    folder: Path, hosts: Sequence[str] = (), drafters: Sequence[str] = (), *, days: int = DAYS, force: bool = False
) -> list[Path]:
    """Write ca.pem, ca.key, and ROLE.pem and ROLE.key for every role into `folder`; return the files.

    `hosts`: names and addresses, beside this machine's own, at which clients reach router and gateway. `drafters`:
    names of drafters, each of which gets a certificate of its own, drafter-NAME.pem. Only the owner can read the keys.
    Raises ConfigError for a wrong name, when a file exists already, unless `force` replaces all of them, or when they
    cannot be written.
    """
    if wrong := [name for name in drafters if not DRAFTER_NAME.fullmatch(name)]:
        raise ConfigError(f"drafter: {wrong[0]!r} is no name; use lower-case letters, digits and '-', at most 63")
    subjects = NAMES | {f"drafter-{name}": (*NAMES["drafter"], f"{name}.{DRAFTER}") for name in drafters}
    files = [folder / f"{name}.{kind}" for name in ("ca", *subjects) for kind in ("pem", "key")]
    existing = [file.name for file in files if file.exists()]
    if existing and not force:
        raise ConfigError(
            f"{folder}: has {', '.join(existing)} already; "
            "make new ones of the same CA by --renew, replace all by --force, or name another folder"
        )
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, "ca", ca, ca_key)
        for role, names in subjects.items():
            key = ec.generate_private_key(ec.SECP256R1())
            subject_names = (*names, *LOCAL, *hosts) if role in CLIENT_FACING else names
            _write(folder, role, _certificate(role, subject_names, key, ca, ca_key, days), key)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return files


def renew(folder: Path, hosts: Sequence[str] = (), *, days: int = DAYS) -> list[Path]:
    """Replace every certificate of the folder's CA, and its key, by new ones for the same names; return the files.

    `hosts` are added to the names of router and gateway. The CA stays as it is. Raises ConfigError when the CA is not
    there or ends too soon, or files cannot be read or written.
    """
    ca = _read_certificate(folder / "ca.pem")
    ca_key = _read_key(folder / "ca.key")
    if ca_key.public_key() != ca.public_key():
        raise ConfigError(f"{folder}: ca.key is not the key of ca.pem; put the CA's own key there")
    if ca.not_valid_after_utc < datetime.now(UTC) + timedelta(days=days):
        raise ConfigError(f"{folder}: the CA expires on {ca.not_valid_after_utc:%Y-%m-%d}; make a new one by --force")
    files: list[Path] = []
    try:
        for file in sorted(folder.glob("*.pem")):
            present = _read_certificate(file)
            if file.name == "ca.pem" or not _is_issued_by(ca, present):
                continue
            extension = present.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            names = [str(name.value) for name in extension.value]
            names += [host for host in hosts if file.stem in CLIENT_FACING and host not in names]
            key = ec.generate_private_key(ec.SECP256R1())
            _write(folder, file.stem, _certificate(file.stem, names, key, ca, ca_key, days), key)
            files += [file, file.with_suffix(".key")]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return files


def _is_issued_by(ca: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{file}: is no certificate that can be read; name a folder of `outrider certs`") from None


def _read_key(file: Path) -> Key:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (OSError, TypeError, ValueError):
        key = None
    if not isinstance(key, Key):
        raise ConfigError(f"{file}: is no key that can be read; renew certificates where the CA's key is kept")
    return key


def _authority(key: Key) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Outrider development CA")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    role: str, names: Iterable[str], key: Key, ca: x509.Certificate, ca_key: Key, days: int
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"outrider {role}"[:COMMON_NAME_CHARACTERS])])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    both = [
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    ]  # a process answers some calls and makes others
    return (
        _builder(subject, ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(folder: Path, name: str, certificate: x509.Certificate, key: Key) -> None:
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / f"{name}.key"
    file.unlink(missing_ok=True)  # an existing file may be open elsewhere
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as to:
        to.write(private)
