import pytest


@pytest.fixture
def card(monkeypatch):
    """Called, it makes this machine look as if it had such a card, with or without liger-kernel; None: as if it had none."""
    import torch

    from bigtrain.run import capacity

    def pretend(name="NVIDIA H200", why_no_liger=""):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(capacity, "why_no_liger", lambda kind: why_no_liger if name else "no CUDA device")

    return pretend
