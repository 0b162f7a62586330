from common.engine.devices import host_memory


def test_free_memory_is_measured_and_limited_by_the_cgroup(tmp_path):
    assert 0 < host_memory.HostMemory().free_bytes() < 1 << 50
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert host_memory._available_in_cgroup(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory._available_in_cgroup(tmp_path) >= 1 << 60
