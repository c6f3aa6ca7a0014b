"""Memory in use against the limits that a kernel enforces, read from faked trees."""

import pytest

from bigtrain.plan.room import FULL_SHARE, WARNING_SHARE, Room, room, verdict

GIB = 2**30


def tree(root, files, total=64, available=60):
    told = {"proc/meminfo": f"MemTotal: {total * 2**20} kB\nMemAvailable: {available * 2**20} kB\n", **files}
    for name, text in told.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return room(root)


def test_page_cache_does_not_count_version_2(tmp_path):
    at = "sys/fs/cgroup/a/memory"
    found = tree(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n", f"{at}.max": 16 * GIB, f"{at}.current": 15 * GIB,
        f"{at}.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\nshmem {GIB}\n",
    })  # fmt: skip
    assert found == Room(12 * GIB, 16 * GIB, "container limit")


def test_page_cache_does_not_count_version_1(tmp_path):
    at = "sys/fs/cgroup/memory/job/memory"
    found = tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/job\n0::/\n", f"{at}.limit_in_bytes": 8 * GIB, f"{at}.usage_in_bytes": 7 * GIB,
        f"{at}.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    })  # fmt: skip
    assert found == Room(6 * GIB, 8 * GIB, "container limit")


def test_the_fullest_limit_counts(tmp_path):
    files = {"sys/fs/cgroup/memory.max": 32 * GIB, "sys/fs/cgroup/memory.current": 16 * GIB}
    assert tree(tmp_path / "a", files).where == "container limit"
    assert tree(tmp_path / "b", files, available=4) == Room(60 * GIB, 64 * GIB, "the machine's memory")
    assert tree(tmp_path / "c", {}, available=48) == Room(16 * GIB, 64 * GIB, "the machine's memory")
    assert room(tmp_path / "nowhere") is None


def at(share, limit=100 * GIB):
    return Room(int(share * limit), limit, "container limit")


@pytest.mark.parametrize("now, before, said", [
    (0.5, None, "fine"), (0.5, 0.1, "fine"), (WARNING_SHARE + 0.001, None, "warning"), (0.95, 0.95, "warning"),
    (FULL_SHARE, FULL_SHARE, "full"), (0.95, 0.92, "full"), (0.95, 0.99, "warning"),
])  # fmt: skip
def test_verdicts(now, before, said):
    assert verdict(at(now), None if before is None else at(before)) == said


def test_another_limit_is_no_growth():
    assert verdict(at(0.95), at(0.5, limit=10 * GIB)) == "warning"
