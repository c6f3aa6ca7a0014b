"""A port for ranks to meet on stays free until they listen."""

import random
import socket

import pytest

from bigtrain.hosts import ports
from bigtrain.hosts.ports import ephemeral_ports, free_port, is_free


def test_B53_an_occupied_port_is_noticed():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_free(server.getsockname()[1])
    assert is_free(free_port())


def test_B53_no_connection_of_another_process_can_take_the_port():
    """Between the choice and rank 0's listening lie seconds; a port that the kernel hands out is gone by then, now and then."""
    lowest, highest = ephemeral_ports()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert lowest <= server.getsockname()[1] <= highest  # what the kernel picks, and so the range is read rightly
    chosen = {free_port() for _ in range(50)}
    assert not any(lowest <= port <= highest for port in chosen) and min(chosen) >= 10_000


def test_processes_with_one_seed_do_not_choose_the_same_port():
    random.seed(1)
    first = [free_port() for _ in range(5)]
    random.seed(1)
    assert [free_port() for _ in range(5)] != first  # equal by chance once in 1e20


@pytest.mark.parametrize(
    ("text", "range_"), [("32768\t60999\n", (32768, 60999)), ("1024 65535", (1024, 65535)), ("nonsense", (32768, 60999))]
)
def test_the_range_is_read_where_linux_says_it(tmp_path, monkeypatch, text, range_):
    told = tmp_path / "range"
    told.write_text(text)
    monkeypatch.setattr(ports, "_EPHEMERAL", told)
    assert ephemeral_ports() == range_
    assert is_free(free_port())  # also where every port is ephemeral
    told.unlink()
    assert ephemeral_ports() == (32768, 60999)
