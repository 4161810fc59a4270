"""What the amdgpu driver says of GPUs, from a copy of its files: PCI addresses, and engines between GPUs."""

from __future__ import annotations

import pytest

from iris_pg.errors import UnsupportedError
from iris_pg.platforms import kfd

BUSES = [0x0C, 0x22, 0x38, 0x5C, 0x9F, 0xAF, 0xBF, 0xDF]
SOCKETS = [2, 3, 0, 1, 6, 7, 4, 5]  # not in the order of nodes
# rec_sdma_eng_map of kfd_topology.c (Linux 6.13): its first three rows, by socket.
KERNEL = {0: [-1, 14, 12, 2, 4, 8, 10, 6], 1: [14, -1, 2, 10, 8, 4, 6, 12], 2: [10, 2, -1, 12, 14, 6, 4, 8]}


@pytest.fixture
def machine(tmp_path):
    def make(masks=None, device_id=0x74A1, version=90402, engines=(2, 14)):
        nodes, pci = tmp_path / "nodes", tmp_path / "pci"
        write(nodes / "0" / "properties", dict(cpu_cores_count=96, simd_count=0))
        write(nodes / "1" / "properties", dict(cpu_cores_count=96, simd_count=0))
        for i, bus in enumerate(BUSES):
            properties = dict(
                simd_count=1216,
                domain=0,
                location_id=bus << 8,
                gfx_target_version=version,
                device_id=device_id,
                num_sdma_engines=engines[0],
                num_sdma_xgmi_engines=engines[1],
                unique_id=2**63 + i,
            )
            write(nodes / str(i + 2) / "properties", properties)
            for k in range(8):
                if k != i:
                    link = dict(type=11, node_from=i + 2, node_to=k + 2, weight=15)
                    if masks:
                        link["recommended_sdma_engine_id_mask"] = masks(i, k)
                    write(nodes / str(i + 2) / "io_links" / str(k) / "properties", link)
            (pci / f"0000:{bus:02x}:00.0").mkdir(parents=True)
            (pci / f"0000:{bus:02x}:00.0" / "xgmi_physical_id").write_text(f"{SOCKETS[i]}\n")
        return nodes, pci

    return make


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name} {value}\n" for name, value in values.items()))


def test_gpus_are_told_by_their_pci_address(machine):
    found = kfd.gpus(machine()[0])
    assert [node.number for node in found] == list(range(2, 10))
    assert [node.address for node in found] == [f"0000:{bus:02x}:00.0" for bus in BUSES]
    assert {node.target for node in found} == {"gfx942"}


def test_the_table_of_sockets_is_that_of_the_kernel(machine):
    nodes, pci = machine()
    by_socket = dict(zip(SOCKETS, kfd.gpus(nodes), strict=True))
    for src, row in KERNEL.items():
        for dst, engine in enumerate(row):
            if dst != src:
                numbers, source = kfd.engine_between(by_socket[src], by_socket[dst], pci)
                assert numbers == [engine] and "table" in source, (src, dst)


def test_the_driver_is_believed_first(machine):
    nodes, pci = machine(lambda i, k: 0b11 << 2 * (k + (k < i)), version=90500)
    first, second, *_ = kfd.gpus(nodes)
    assert first.target == "gfx950"
    assert kfd.engine_between(first, second, pci) == ([2, 3], "the driver's recommended_sdma_engine_id_mask")


def test_engines_that_do_not_exist_are_refused(machine):
    nodes, pci = machine(lambda i, k: 0b11 << 2, device_id=0x74A2)
    first, second, *_ = kfd.gpus(nodes)
    with pytest.raises(UnsupportedError, match="engine 3 of 0000:0c:00.0 does not exist.*even numbers"):
        kfd.engine_between(first, second, pci)


def test_too_few_engines(machine):
    nodes, pci = machine(engines=(2, 6))
    by_socket = dict(zip(SOCKETS, kfd.gpus(nodes), strict=True))
    with pytest.raises(UnsupportedError, match="engine 14 .* there are 8"):
        kfd.engine_between(by_socket[0], by_socket[1], pci)


def test_nobody_says(machine):
    nodes, pci = machine(version=90010)
    first, second, *_ = kfd.gpus(nodes)
    assert first.target == "gfx90a"
    with pytest.raises(UnsupportedError, match="not known: the driver recommends none"):
        kfd.engine_between(first, second, pci)


def test_a_machine_without_the_driver(tmp_path):
    assert kfd.gpus(tmp_path / "nothing") == []
