"""Predicates of this machine, by address and by host name."""

import pytest

from warmline_common.process.loopback import DOCKER_HOST, is_local


@pytest.mark.parametrize(
    ("peer", "host", "local"),
    [
        ("127.0.0.1", "127.0.0.1:8025", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "LocalHost.:8025", True),
        ("127.0.0.1", "backend.localhost:8025", True),
        ("::1", "[::1]:8025", True),
        ("127.0.0.1", "host.docker.internal:8025", False),
        ("127.0.0.1", "attacker.example", False),
        ("127.0.0.1", "127.0.0.1.attacker.example:8025", False),
        ("127.0.0.1", "localhost.attacker.example", False),
        ("127.0.0.1", "10.0.0.5:8025", False),
        ("127.0.0.1", "", False),
        ("10.0.0.5", "127.0.0.1:8025", False),
        ("", "localhost", False),
        ("::ffff:127.0.0.1", "localhost", True),
    ],
)
def test_local_request_needs_loopback_peer_and_name(peer: str, host: str, local: bool) -> None:
    assert is_local(peer, [host]) is local
    assert not is_local(peer, [host, host]) and not is_local(peer, [])


def test_docker_host_counts_as_local_name() -> None:
    assert is_local("127.0.0.1", ["host.docker.internal:8025"], (DOCKER_HOST,))
    assert not is_local("10.0.0.5", ["host.docker.internal:8025"], (DOCKER_HOST,))
