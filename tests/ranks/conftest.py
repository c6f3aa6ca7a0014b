import pytest

from tests.ranks.pool import Pools


@pytest.fixture(scope="session")
def rank_pool():
    """`rank_pool(world).run(function, *args)` runs a module-level function on every rank of a persistent gloo pool."""
    pools = Pools()
    yield pools
    pools.stop()


def pytest_collection_modifyitems(items):
    """Tests of one world size run next to each other, so that pools are started once.

    A test says its world by a parameter named `world`; others keep their place.
    """

    def world_of(item):
        world = item.callspec.params.get("world") if hasattr(item, "callspec") else None
        return world if isinstance(world, int) else 2

    items.sort(key=world_of)
