"""What memory is available, by the files in which Linux tells it."""

import pytest

from pfml.memory import available_memory

GIB = 2**30


@pytest.fixture
def linux(tmp_path):
    """A machine with 8 GiB available; `put` writes a file of it."""

    def put(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    put("proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\nHugePages_Total: 0\n")
    return put


def available(tmp_path):
    return available_memory(tmp_path / "proc", tmp_path / "groups")


def test_without_control_groups_it_is_what_linux_calls_available(linux, tmp_path):
    assert available(tmp_path) == 8 * GIB
    linux("proc/self/cgroup", "0::/\n")
    assert available(tmp_path) == 8 * GIB


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [
        ("0::/user/job", "groups/user", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/user/job",
            "groups/memory/user",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
        ("4:cpu,memory:/elsewhere", "groups/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "x")),
    ],
)
def test_a_container_leaves_its_limit_but_for_what_it_uses(linux, tmp_path, line, top, names):
    linux("proc/self/cgroup", f"9:cpu:/\n{line}\n")
    linux(f"{top}/{names[0]}", str(4 * GIB))
    linux(f"{top}/{names[1]}", str(3 * GIB))
    linux(f"{top}/memory.stat", f"anon 5\n{names[2]} {GIB // 2}\n")
    if names[2] == "x":
        assert available(tmp_path) == GIB
    else:
        assert available(tmp_path) == 3 * GIB // 2
        linux(f"{top}/job/{names[0]}", "max" if "max" in names[0] else str(2**63))
        linux(f"{top}/job/{names[1]}", "7")
        linux(f"{top}/job/memory.stat", "")
        assert available(tmp_path) == 3 * GIB // 2
    linux(f"{top}/{names[1]}", str(5 * GIB))
    assert available(tmp_path) == 0


def test_a_system_that_does_not_say_is_no_guess(tmp_path):
    assert available(tmp_path) is None


def test_this_machine_says_it_if_it_is_linux():
    from pathlib import Path

    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux says it")
    found = available_memory()
    assert found is not None
    assert 0 < found < 2**50
