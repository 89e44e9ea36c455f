"""Memory that a process may use: the machine's, within the limits of its cgroups."""

from pathlib import Path

import pytest

from bert_recipe.utils.memory import available_memory, total_memory

MIB = 2**20
MEMINFO = "MemTotal: 8192 kB\nMemFree: 1024 kB\nMemAvailable: 4096 kB\nSwapTotal: 2048 kB\n"
V1 = {
    "memory.limit_in_bytes": 3 * MIB,
    "memory.usage_in_bytes": 2 * MIB,
    "memory.stat": "total_inactive_file 524288\n",
}
V2 = {
    "memory.max": 3 * MIB,
    "memory.current": 2 * MIB,
    "memory.stat": "anon 1\ninactive_file 524288\nslab 7\n",
}
UNLIMITED = {
    "v1": {**V1, "memory.limit_in_bytes": 9223372036854771712},
    "v2": {**V2, "memory.max": "max"},
}


def machine(root: Path, cgroup: str, groups: dict[str, dict]) -> Path:
    """A file system with /proc/meminfo, /proc/self/cgroup, and the files of cgroups."""
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup}
    files |= {
        f"sys/fs/cgroup/{group}/{name}": text
        for group, names in groups.items()
        for name, text in names.items()
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n" if isinstance(text, int) else text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "groups", "limited"),
    [
        ("0::/\n", {}, False),
        ("0::/job\n", {"job": UNLIMITED["v2"]}, False),
        ("0::/job\n", {"job": V2}, True),
        ("0::/job/step\n", {"job": V2, "job/step": UNLIMITED["v2"]}, True),
        ("0::/\n", {".": V2}, True),  # a container sees its own group as the root
        ("0::/../../host/path\n", {".": V2}, True),
        ("9:cpu:/other\n4:memory:/job\n0::/\n", {"memory/job": V1, "cpu/other": V1}, True),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job": V1}, True),
        ("4:memory:/host/path\n", {"memory": V1}, True),
        (
            "4:memory:/job\n0::/\n",
            {"memory/job": UNLIMITED["v1"], "memory": UNLIMITED["v1"]},
            False,
        ),
        ("4:cpu:/job\n", {"memory/job": V1}, False),
    ],
)
def test_memory_is_the_least_of_the_machine_and_its_cgroups(tmp_path, cgroup, groups, limited):
    root = machine(tmp_path, cgroup, groups)
    assert available_memory(root) == (1.5 * MIB if limited else 4 * MIB)
    assert total_memory(root) == (3 * MIB if limited else 10 * MIB)


def test_group_above_its_limit_has_no_negative_rest_that_hides_the_machine(tmp_path):
    full = {**V2, "memory.current": 5 * MIB}
    assert available_memory(machine(tmp_path, "0::/\n", {".": full})) <= 0
