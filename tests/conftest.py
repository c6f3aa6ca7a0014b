import os

import pytest

# Files of half a minute and more, the longest first: with two workers, what comes last must be short.
LONG = """
test_train test_bench test_hosts test_checkpoint_reshard test_checkpoint_engine test_doctor test_engine_grid test_preflight
test_host_memory test_hangs test_checkpoint_crash test_checkpoint_blocks test_checkpoint_deepspeed test_engine_checkpoint
""".split()  # noqa: SIM905

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def same_environment():
    """What a test, or the code that it calls, sets (a launcher's LOCAL_RANK, say) does not reach the next test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Long files come first (xdist: --no-loadscope-reorder); tests that need a CUDA device are skipped where there is none."""
    import torch

    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
