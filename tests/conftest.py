import os

import pytest

from tests import keep_imports

# Files of half a minute and more: with two workers, what comes last must be short. Beside the longest, which computes, those that
# wait half of the time.
LONG = """
test_train test_hosts test_doctor test_hangs test_host_memory test_preflight test_bench test_checkpoint_engine test_checkpoint_reshard
test_engine_grid test_checkpoint_crash test_checkpoint_blocks test_checkpoint_deepspeed test_engine_checkpoint
""".split()  # noqa: SIM905

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def same_environment():
    """What a test, or the code that it calls, sets (a launcher's LOCAL_RANK, say) does not reach the next test."""
    environ, before = os.environ, dict(os.environ)
    yield
    os.environ = environ  # noqa: B003  # datasets puts a copy there
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="session")
def known_imports():
    """How many modules the garbage collector has been told to leave alone: all that collecting the tests imported, and with it the
    thousands of tests themselves. Building a model collects; over all of that it took half a second each time."""
    return [keep_imports(0)]


@pytest.fixture(autouse=True)
def imports_kept(known_imports):
    """What a test imports is left alone from the next one on."""
    yield
    known_imports[0] = keep_imports(known_imports[0])


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
