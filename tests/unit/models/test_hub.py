"""A hub that cannot be reached: told in seconds, with what to do, or left alone where the cache has what is asked for."""

import logging
import socket
import time

import pytest
from huggingface_hub import constants, snapshot_download

from bigtrain.errors import ModelError
from bigtrain.models import hub
from bigtrain.models.source import fetched


@pytest.fixture
def silent(monkeypatch):
    """A hub that takes connections and never answers, as behind a firewall."""
    listener = socket.create_server(("127.0.0.1", 0))
    online(monkeypatch, listener)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    yield
    listener.close()


@pytest.fixture
def refusing(monkeypatch):
    """A hub whose port nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        online(monkeypatch, listener)


def online(monkeypatch, listener):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_heard", [])


def test_what_to_do_without_the_hub_is_said_at_once(refusing):
    began = time.monotonic()
    with pytest.raises(ModelError, match="HF_ENDPOINT") as said:
        fetched("some/model")
    assert time.monotonic() - began < 5
    for word in (
        "some/model: ",
        "cannot be reached",
        constants.ENDPOINT,
        "local folder",
        "hf download some/model",
        "HF_HUB_OFFLINE=1",
    ):
        assert word in str(said.value)


def test_a_hub_that_does_not_answer_is_not_waited_for(silent):
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"some/model, some/other: .*no answer within 0.5 s"):
        hub.look_for("some/model", "some/other")
    assert time.monotonic() - began < 5


def test_what_the_cache_has_is_used(refusing, tmp_path, monkeypatch, caplog):
    kept = tmp_path / "models--some--model"
    snapshot = kept / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    caplog.set_level(logging.WARNING, "bigtrain.models.hub")
    began = time.monotonic()
    hub.look_for("some/model", None)
    assert snapshot_download("some/model", cache_dir=tmp_path) == str(snapshot)
    assert time.monotonic() - began < 5 and "some/model from the cache" in caplog.text
    with pytest.raises(ModelError, match=r"^other/tokenizer: .*ConnectError.*; a new start asks again\)") as said:
        hub.look_for("some/model", "other/tokenizer")
    assert "HF_HUB_OFFLINE is set" not in str(said.value)


def test_a_hub_that_is_not_to_be_asked_is_not_asked(silent, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    began = time.monotonic()
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        hub.look_for("some/model")
    assert time.monotonic() - began < 0.4


def test_no_hub_is_asked_for_what_is_none_of_it(refusing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "model").mkdir(parents=True)
    hub.look_for("preset:llama-tiny", "./a", "/b", "a/b/c", "own/model", None, tmp_path, lambda: None)
    assert not constants.HF_HUB_OFFLINE  # asked, this hub would have been given up
