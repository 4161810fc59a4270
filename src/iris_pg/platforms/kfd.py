"""What the amdgpu driver says of the machine's GPUs: their PCI addresses, and which SDMA engine leads to which peer.

Read from files of the kernel, ``/sys/class/kfd/kfd/topology/nodes`` and ``/sys/bus/pci/devices``; no library is needed.
Sources: Linux ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c`` (properties of nodes and io_links), ``amdgpu_xgmi.c``
(xgmi_physical_id); for engines, ``rec_sdma_eng_map`` there, and ``mi300xOamMap`` of rocm-xio.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from iris_pg.errors import UnsupportedError

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PCI = Path("/sys/bus/pci/devices")

# Row: OAM (socket) of the source; column: of the destination. Half of the number of the engine on the link between.
_OAM = (
    (0, 7, 6, 1, 2, 4, 5, 3),
    (7, 0, 1, 5, 4, 2, 3, 6),
    (5, 1, 0, 6, 7, 3, 2, 4),
    (1, 6, 5, 0, 3, 7, 4, 2),
    (2, 4, 7, 3, 0, 5, 6, 1),
    (4, 2, 3, 7, 6, 0, 1, 5),
    (5, 3, 2, 4, 6, 1, 0, 7),
    (3, 6, 4, 2, 1, 5, 7, 0),
)
_OAM_TARGET = "gfx942"
_ONLY_EVEN = 0x74A2  # MI308X: engines with odd numbers do not exist


@dataclass(frozen=True)
class Node:
    """A GPU.

    Args:
        number: of its node in the driver's topology.
        address: PCI address, as ``0000:0c:00.0``.
        target: architecture, as ``gfx942``.
        device_id: of PCI.
        engines, link_engines: number of SDMA engines for the host, and for links between GPUs.
        recommended: number of another node -> mask of the engines that the driver recommends for copies there.
    """

    number: int
    address: str
    target: str
    device_id: int
    engines: int
    link_engines: int
    recommended: dict[int, int] = field(default_factory=dict)


def gpus(root: Path = NODES) -> list[Node]:
    """Return the machine's AMD GPUs that this process may look at; none when there is no driver."""
    found = []
    for folder in sorted(root.glob("[0-9]*"), key=lambda path: int(path.name)):
        p = _properties(folder / "properties")
        if not p.get("simd_count"):
            continue  # a CPU, or a GPU that is kept from this process
        links = [_properties(link) for link in sorted(folder.glob("*_links/*/properties"))]
        masks = {link["node_to"]: link.get("recommended_sdma_engine_id_mask", 0) for link in links if "node_to" in link}
        found.append(
            Node(
                int(folder.name),
                _address(p.get("domain", 0), p.get("location_id", 0)),
                _target(p.get("gfx_target_version", 0)),
                p.get("device_id", 0),
                p.get("num_sdma_engines", 0),
                p.get("num_sdma_xgmi_engines", 0),
                {node: mask for node, mask in masks.items() if mask},
            )
        )
    return found


def engine_between(src: Node, dst: Node, pci: Path = PCI) -> tuple[list[int], str]:
    """Return the numbers of the SDMA engines of ``src`` for copies to ``dst``, best first, and who says so.

    Raises:
        UnsupportedError: nobody says which, or an engine that does not exist.
    """
    if mask := src.recommended.get(dst.number):
        numbers, source = [bit for bit in range(32) if mask >> bit & 1], "the driver's recommended_sdma_engine_id_mask"
    elif src.target == _OAM_TARGET:
        numbers, source = [2 * _OAM[_oam(src, pci)][_oam(dst, pci)]], "the table of sockets of MI300X"
    else:
        raise UnsupportedError(
            f"which SDMA engine of {src.address} ({src.target}) leads to {dst.address} is not known: the driver "
            f"recommends none, and the table of sockets is for {_OAM_TARGET}; use a newer amdgpu driver"
        )
    all_engines = src.engines + src.link_engines
    for number in numbers:
        if number >= all_engines or (src.device_id == _ONLY_EVEN and number % 2):
            raise UnsupportedError(
                f"SDMA engine {number} of {src.address} does not exist, though {source} names it for {dst.address}: "
                f"there are {all_engines}{', those with even numbers' if src.device_id == _ONLY_EVEN else ''}; use a "
                "newer amdgpu driver, or engine='cu'"
            )
    return numbers, source


def _oam(node: Node, pci: Path) -> int:
    try:
        number = int((pci / node.address / "xgmi_physical_id").read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"the socket of {node.address} is not known: {error}; use a newer amdgpu driver"
        ) from None
    if not 0 <= number < len(_OAM):
        raise UnsupportedError(
            f"{node.address} is in socket {number}; the table of MI300X has sockets 0..{len(_OAM) - 1}"
        )
    return number


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}  # another container's
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def _address(domain: int, location: int) -> str:
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _target(version: int) -> str:
    """Return the name of a gfx_target_version: 90402 is gfx942, minor and stepping in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


__all__ = ["NODES", "PCI", "Node", "engine_between", "gpus"]
