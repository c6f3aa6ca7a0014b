"""Lines between watches: real sockets, real processes."""

import json
import os
import signal
import socket
import threading
import time

import pytest
import torch

from bigtrain.watch import stacks
from bigtrain.watch.mesh import Mesh, listen, process_status, start_tick
from bigtrain.watch.watcher import Pulse
from bigtrain.whereabouts import HERE, Whereabouts


def meshes(n=2, token="secret"):
    pairs = [listen(r, local=True) for r in range(n)]
    everyone = [address for _, address in pairs]
    return [Mesh(listener, everyone, r, token) for r, (listener, _) in enumerate(pairs)]


def heard(mesh, others, until, limit_s=10.0):
    """Polls all until `until(messages of mesh)` is true."""
    found, end = [], time.monotonic() + limit_s
    while time.monotonic() < end and not until(found):
        found += mesh.poll(0.02)
        for other in others:
            other.poll(0.0)
    assert until(found), found
    return found


def connected(*all_of_them):
    end = time.monotonic() + 10
    while time.monotonic() < end and any(len(m.reached) < len(all_of_them) - 1 for m in all_of_them):
        for m in all_of_them:
            m.poll(0.01)
    assert all(len(m.reached) == len(all_of_them) - 1 for m in all_of_them)


def test_all_hear_all_and_an_end_is_noticed():
    a, b, c = meshes(3)
    connected(a, b, c)
    b.say({"step": 1})
    b.say({"step": 2})
    assert heard(a, [b], lambda m: len(m) == 2) == [(1, {"step": 1}), (1, {"step": 2})]
    assert heard(c, [b], lambda m: len(m) == 2)[1] == (1, {"step": 2})
    b.close()
    assert heard(a, [c], bool) == [(1, None)] and a.reached == {2}
    a.close(), c.close()


def test_strangers_are_not_heard():
    a, b = meshes(2)
    port = a._listener.getsockname()[1]
    for line in (b'{"hello": 1, "token": "guessed"}\n{"verdict": {}}\n', b"\x00\xff nonsense\n", b'{"hello": "x"}\n'):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
            for _ in range(5):
                assert a.poll(0.02) == [] and a.reached == set()
    connected(a, b)
    a.close(), b.close()


def test_a_rank_that_does_not_read_does_not_block_the_others():
    a, b = meshes(2)
    connected(a, b)
    begun = time.monotonic()
    for _ in range(3000):
        a.say({"x": "y" * 1000})  # more than any socket buffer holds
    assert time.monotonic() - begun < 5 and len(a._outgoing[1]) < 200_000
    for _, message in heard(b, [a], lambda m: len(m) >= 100):
        assert message == {"x": "y" * 1000}  # what arrives is whole
    a.close(), b.close()


def test_a_forked_worker_does_not_hold_the_line():
    a, b = meshes(2)
    connected(a, b)
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    try:
        b.close()
        assert heard(a, [], bool, limit_s=5) == [(1, None)]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    a.close()


def test_a_stopped_process_is_seen_and_known_by_more_than_its_number():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    started = start_tick(pid)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert process_status(pid) == ["T", started] and started.isdigit()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert process_status(pid) is None and start_tick(pid) == ""


@pytest.fixture
def elsewhere():
    """A thread inside a module's forward until it is let go."""

    class Slow(torch.nn.Module):
        def forward(self, go):
            go.wait()
            return go

    model = torch.nn.Sequential(Slow())
    go = threading.Event()
    thread = threading.Thread(target=model, args=(go,))
    thread.start()
    time.sleep(0.1)
    yield model, thread.ident
    go.set()
    thread.join()


def test_stacks_know_module_and_movement_without_hooks(elsewhere):
    model, ident = elsewhere
    names = {id(m): name for name, m in model.named_modules()}
    assert stacks.module_in(ident, names) == "0" and stacks.module_in(threading.get_ident(), names) == ""
    assert stacks.signature(ident) == stacks.signature(ident)
    assert "test_mesh.py" in "".join(stacks.lines(ident)) and "forward" in stacks.all_threads()
    pulse = Pulse(ident)
    pulse.since -= 100
    assert pulse.idle_s() >= 100
    HERE.touch()
    assert pulse.idle_s() < 1


def test_whereabouts_nest():
    here = Whereabouts()
    with here.together("outer", 100):
        with here.together("inner"):
            assert here.waiting and here.place == "inner" and here.patient_until == 0.0
        assert here.waiting and here.place == "outer" and here.patient_until > time.monotonic() + 50
        here.stepped(3)
    assert not here.waiting and here.place == "between steps" and here.step == 3 and here.started


def test_the_flight_recorder_is_read_if_it_is_there():
    entry = {
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": 7,
        "process_group": ["0", "default_pg"],
        "input_sizes": [[4]],
    }
    assert stacks.last_collective([entry]) == "" or "number 7" in stacks.last_collective([entry])
    assert stacks.spelled(json.loads(json.dumps(entry))) == "nccl:all_reduce number 7 of group 0, sizes [[4]]"
