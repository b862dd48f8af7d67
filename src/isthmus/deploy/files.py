"""What lies on the machines of a federation: who takes part, under which recipe, with which keys.

app/    the Flower app that `flwr run` submits: federation.json, recipe.toml and two modules of two lines
link/   the coordinator's machine: its key, TLS certificate and key, Flower's configuration
sites/  one folder for each client, to be carried to its machine: key, certificate of the authority, recipe, policy
ca/     the authority that signed the certificate; keep it offline
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..core.recipe import Recipe, RecipeError, parse
from ..engines.messages import PublicKey, Refused, new_key, private_bytes, public_text, read_public

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
MODULE = "federation_app"


class DeployError(ValueError):
    """A federation's folder or process that is not as it must be; says what to do."""


@dataclass(frozen=True)
class Client:
    """One enrolled client."""

    name: str
    key: str  # OpenSSH line
    rows: float | None = None


@dataclass(frozen=True)
class Federation:
    """Who takes part; the same file on every machine."""

    name: str
    coordinator: str  # OpenSSH line
    clients: tuple[Client, ...]
    recipe: str  # digest

    def write(self, path: Path) -> None:
        """As JSON."""
        table = {"name": self.name, "recipe": self.recipe, "coordinator": self.coordinator}
        rows = [{"name": c.name, "key": c.key} | ({} if c.rows is None else {"rows": c.rows}) for c in self.clients]
        path.write_text(json.dumps(table | {"clients": rows}, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Federation:
        """From JSON.

        Raises:
            DeployError: not readable, or with names, keys or numbers that cannot be.
        """
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            clients = tuple(
                Client(str(c["name"]), str(c["key"]), None if c.get("rows") is None else float(c["rows"])) for c in table["clients"]
            )
            out = Federation(str(table["name"]), str(table["coordinator"]), clients, str(table["recipe"]))
            if bad := [n for n in (out.name, *(c.name for c in clients)) if not NAME.match(n)]:
                raise ValueError(f"name {bad[0][:40]!r}: letters, digits, - and _ only")
            keys = [public_text(read_public(k)) for k in (out.coordinator, *(c.key for c in clients))]
            if len(set(keys)) < len(keys):
                raise ValueError("the same key stands twice")
            if any(c.rows is not None and not 0 < c.rows < 1e12 for c in clients):
                raise ValueError("rows must be above 0")
        except (OSError, ValueError, KeyError, TypeError, RecursionError, Refused) as error:
            raise DeployError(f"{path.name}: not a federation's file: {error!s}") from None
        return out

    def keys(self) -> dict[int, PublicKey]:
        """Public keys by client number."""
        return {i: read_public(c.key) for i, c in enumerate(self.clients)}


def of_folder(folder: Path) -> Federation:
    """The federation in a folder that `create` wrote.

    Raises:
        DeployError: another folder.
    """
    path = folder / "app" / MODULE / "federation.json"
    if not path.is_file():
        raise DeployError(f"{folder} is not a federation's folder; isthmus deploy init makes one")
    return Federation.read(path)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        DeployError, RecipeError: not readable, or a mistake in it.
    """
    try:
        return parse(tomllib.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeployError(f"{path.name}: not a readable recipe: {error}") from None


def digest(recipe: Recipe) -> str:
    """What coordinator and sites compare: SHA-256 of the whole recipe."""
    return hashlib.sha256(json.dumps(recipe.table(), sort_keys=True).encode()).hexdigest()


def for_deployment(recipe: Recipe, clients: int, own_data: bool) -> Recipe:
    """The recipe as it runs between machines.

    With ``own_data`` every site brings its own rows and the coordinator has none; otherwise all machines load the recipe's data, and
    each site uses its client's part of it (a trial, or a set that is on every machine).
    """
    where: dict[str, Any] = {"partition.kind": "seat", "data.source": "nowhere"} if own_data else {}
    return recipe.updated(where | {"partition.clients": clients, "evaluate.references": False})


def seated(recipe: Recipe, seat: int, data: str | None) -> Recipe:
    """The recipe at one site."""
    if recipe.partition.kind != "seat":
        return recipe
    if not data:
        raise DeployError("site.toml: data = is missing; the recipe expects this site's own rows")
    return recipe.updated({"partition.seat": seat, "data.source": data})


def _secret(path: Path, data: bytes) -> None:
    path.touch(0o600)
    os.chmod(path, 0o600)
    path.write_bytes(data)


def authority(folder: Path, name: str, days: int = 3650) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate authority of the federation's own, ``ca.pem`` and ``ca.key``; an existing one is used again."""
    if (folder / "ca.key").exists():
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        return x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()), key  # type: ignore[return-value]
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Isthmus federation {name}")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _secret(folder / "ca.key", _pem(key))
    return certificate, key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def server_certificate(
    folder: Path, ca: tuple[x509.Certificate, ec.EllipticCurvePrivateKey], hosts: Sequence[str], days: float = 825
) -> None:
    """``server.pem`` and ``server.key`` in ``folder`` for these host names and addresses; loopback always among them."""
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0] if hosts else "localhost")]))
        .issuer_name(ca[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2 if days < 0 else 0, minutes=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca[1].public_key()), critical=False)
        .sign(ca[1], hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _secret(folder / "server.key", _pem(key))


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[v6]:port".

    Raises:
        DeployError: otherwise.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or not host.strip("[]"):
        raise DeployError(f"address {address!r}: expected host:port, such as link.example.org:8000")
    return host.strip("[]"), int(port)


def create(
    folder: Path, recipe: Recipe, names: Sequence[str], address: str = "127.0.0.1:8000", own_data: bool = False, insecure: bool = False
) -> Federation:
    """Write a federation's folder.

    Raises:
        DeployError: a name that cannot be, twice the same, a folder that is not empty.
        RecipeError: a recipe that cannot run between machines.
    """
    if len(names) < 2 or len(set(names)) < len(names) or any(not NAME.match(n) for n in names):
        raise DeployError(f"clients {', '.join(names)}: two or more, each once, of letters, digits, - and _")
    if folder.exists() and any(folder.iterdir()):
        raise DeployError(f"{folder} is not empty; name a new folder")
    if recipe.method.kind in ("local", "pooled"):
        raise RecipeError(f"method.kind = {recipe.method.kind!r}: a reference line does not run between machines")
    host, _ = split_address(address)
    recipe = for_deployment(recipe, len(names), own_data)
    app, link, module = folder / "app", folder / "link", folder / "app" / MODULE
    for path in (module, link / "flwr"):
        path.mkdir(parents=True)
    os.chmod(link, 0o700)
    coordinator, text = new_key(), tomli_w.dumps(recipe.table())
    _secret(link / "coordinator.key", private_bytes(coordinator))
    keys = {name: new_key() for name in names}
    clients = tuple(Client(name, public_text(keys[name])) for name in names)
    federation = Federation(re.sub(r"[^A-Za-z0-9_-]", "-", recipe.name)[:63], public_text(coordinator), clients, digest(recipe))
    if not insecure:
        ca = authority(folder / "ca", federation.name)
        server_certificate(link, ca, [host])
        os.chmod(folder / "ca", 0o700)
        (link / "ca.pem").write_bytes((folder / "ca" / "ca.pem").read_bytes())
    for i, name in enumerate(names):
        site = folder / "sites" / name
        site.mkdir(parents=True, mode=0o700)
        _secret(site / "node.key", private_bytes(keys[name]))
        (site / "node.pub").write_text(public_text(keys[name]) + "\n")
        if not insecure:
            (site / "ca.pem").write_bytes((folder / "ca" / "ca.pem").read_bytes())
        (site / "recipe.toml").write_text(text)
        federation.write(site / "federation.json")
        (site / "site.toml").write_text(_site_text(i, address, own_data))
    federation.write(module / "federation.json")
    (module / "recipe.toml").write_text(text)
    (module / "__init__.py").write_text("")
    (module / "server.py").write_text(
        "from pathlib import Path\n\nfrom isthmus.deploy.apps import server_app\n\napp = server_app(Path(__file__).parent)\n"
    )
    (module / "client.py").write_text("from isthmus.deploy.apps import client_app\n\napp = client_app()\n")
    (app / "pyproject.toml").write_text(_app_text(federation.name, link.resolve()))
    security = "insecure = true\n" if insecure else f'root-certificates = "{(link / "ca.pem").resolve()}"\n'
    (link / "flwr" / "config.toml").write_text(f'[superlink]\ndefault = "link"\n\n[superlink.link]\naddress = "{address}"\n{security}')
    (folder / "compose.yaml").write_text(_compose_text(names, address, insecure))
    return federation


def _site_text(client: int, address: str, own_data: bool) -> str:
    data = 'data = "rows.csv"  # this site\'s own rows; a path from this folder' if own_data else "# the recipe's data are on every machine"
    return f"""# What this machine knows and insists on; nothing of it can be changed from outside.
client = {client}
link = "{address}"
{data}

[policy]
message = 1073741824  # bytes of a request at most
participants = 3      # clients that a secure sum has at least
secure = false        # true: send nothing but through a secure sum
private = false       # true: send nothing without noise
"""


def _app_text(name: str, link: Path) -> str:
    return f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federation-{name.lower()}"
version = "1.0.0"
description = "An Isthmus federation"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["{MODULE}"]

[tool.flwr.app]
publisher = "isthmus"

[tool.flwr.app.components]
serverapp = "{MODULE}.server:app"
clientapp = "{MODULE}.client:app"

[tool.flwr.app.config]
link = {json.dumps(str(link))}
runs = ""
"""


def _compose_text(names: Sequence[str], address: str, insecure: bool) -> str:
    """A compose file: the link, and every site as a service of its own (carry one of them and its folder to each machine)."""
    port, plain = split_address(address)[1], ", --insecure" if insecure else ""
    build = "build: {context: ., dockerfile_inline: \"FROM python:3.11-slim\\nRUN pip install 'isthmus[newsroom,deploy]'\"}"
    out = f"""services:
  link:
    {build}
    command: [isthmus, deploy, link, /federation, --host, 0.0.0.0, --port, "{port}"{plain}]
    volumes: [".:/federation"]
    ports: ["{port}:{port}"]
"""
    for name in names:
        out += f"""  {name}:
    {build}
    command: [isthmus, deploy, node, /site{plain}]
    volumes: ["./sites/{name}:/site"]
    restart: unless-stopped
"""
    return out


@dataclass(frozen=True)
class SiteFile:
    """``site.toml``."""

    client: int
    link: str
    data: str | None
    policy: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> SiteFile:
        """From a site's folder.

        Raises:
            DeployError: not readable, unknown or wrong fields.
        """
        try:
            table = tomllib.loads((folder / "site.toml").read_text(encoding="utf-8"))
            if unknown := set(table) - {"client", "link", "data", "policy"}:
                raise ValueError(f"{sorted(unknown)[0]}: no such field; accepted are client, link, data and [policy]")
            policy = dict(table.get("policy", {}))
            kinds: dict[str, type] = {"message": int, "participants": int, "secure": bool, "private": bool}
            if unknown := set(policy) - set(kinds):
                raise ValueError(f"policy.{sorted(unknown)[0]}: no such field; accepted are {', '.join(kinds)}")
            for n, value in policy.items():
                if type(value) is not kinds[n] or (isinstance(value, int) and kinds[n] is int and value < 1):
                    raise ValueError(
                        f"policy.{n} = {value!r}: must be {'true or false' if kinds[n] is bool else 'a whole number from 1 on'}"
                    )
            if type(table.get("client")) is not int or table["client"] < 0:
                raise ValueError("client: must be a whole number from 0 on")
            if table.get("data") is not None and not isinstance(table["data"], str):
                raise ValueError("data: must be a path")
            split_address(str(table.get("link")))
        except (OSError, ValueError, TypeError) as error:
            raise DeployError(f"{folder.name}/site.toml: {error}") from None
        return SiteFile(table["client"], table["link"], table.get("data"), policy)
