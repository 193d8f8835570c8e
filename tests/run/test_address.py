"""Addresses and keys that clients are told to use."""

from pathlib import Path

import pytest

from warmline_common.settings.resolve import resolve
from warmline_run import address
from warmline_run.address import Address, make_address


@pytest.fixture(autouse=True)
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Studio.home.arpa")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(address, "lan_address", lambda: "192.168.1.5")
    monkeypatch.setattr(address, "format_program", lambda name: name)


@pytest.mark.parametrize(
    ("host", "url", "more"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1", ""),
        ("::1", "http://[::1]:80/v1", ""),
        ("192.168.1.9", "http://192.168.1.9:80/v1", ""),
        ("0.0.0.0", "http://192.168.1.5:80/v1", "also http://studio.local:80/v1 and http://127.0.0.1:80/v1\n"),
        ("::", "http://192.168.1.5:80/v1", "also http://studio.local:80/v1 and http://[::1]:80/v1\n"),
    ],
)
def test_wildcard_address_shows_network_names(host: str, url: str, more: str) -> None:
    assert (Address(host, 80).url, Address(host, 80).alternatives_line) == (url, more)


def test_mac_shows_bonjour_name_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(address, "bonjour_name", lambda: "studio.local")
    wildcard = Address("0.0.0.0", 80)
    assert wildcard.url == "http://studio.local:80/v1"
    assert wildcard.alternatives_line == "also http://192.168.1.5:80/v1 and http://127.0.0.1:80/v1\n"
    monkeypatch.setattr(address, "lan_address", lambda: "")
    assert (wildcard.url, wildcard.alternatives_line) == ("http://studio.local:80/v1", "also http://127.0.0.1:80/v1\n")


def test_example_command_includes_required_key() -> None:
    assert "Authorization" not in Address("127.0.0.1", 80).curl_command(needs_key=False)
    assert '-H "Authorization: Bearer $(cachectl key show)"' in Address("0.0.0.0", 80).curl_command(needs_key=True)
    assert "$(cachectl key show --home '/my home')" in Address("0.0.0.0", 80, home="/my home").curl_command(
        needs_key=True
    )
    assert """-d '{"model": "a b", "messages": """ in Address("127.0.0.1", 80).curl_command(False, "a b")
    named = Address("127.0.0.1", 80, key="hush").curl_command(needs_key=True)
    assert "Bearer $WARMLINE_CLIENT_KEY" in named and "hush" not in named


def test_command_is_shown_with_path_when_not_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for place in ("own", "else where"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "cachectl").touch(mode=0o755)
    own = tmp_path / "else where"
    monkeypatch.setattr("sys.executable", str(own / "python"))
    for path, command in (("own", f"'{own}/cachectl'"), ("else where", "cachectl"), ("none", f"'{own}/cachectl'")):
        monkeypatch.setenv("PATH", str(tmp_path / path))
        assert address.format_program("cachectl") == command
    assert address.format_program("warmline") == "warmline", "it is installed otherwise"


@pytest.mark.parametrize(
    ("settings", "host"),
    [({}, "127.0.0.1"), ({"lan": "true"}, "0.0.0.0"), ({"lan": "true", "host": "10.0.0.7"}, "10.0.0.7")],
)
def test_lan_replaces_loopback_address(tmp_path: Path, settings: dict[str, str], host: str) -> None:
    found = make_address(resolve({"home": str(tmp_path), **settings}, {}))
    assert (found.host, found.home) == (host, str(tmp_path))
