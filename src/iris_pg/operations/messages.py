"""Messages between two ranks."""

# torch calls each of these with several sets of arguments, which its stubs list as overloads.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from iris_pg import arguments
from iris_pg.errors import UnsupportedError, where
from iris_pg.operations.base import Operations, Tensor, copy, dense, room
from iris_pg.work import IrisWork


class Messages(Operations):
    """send, recv, and recv from any rank."""

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> IrisWork:
        """Send a tensor of any layout to rank ``dst`` of the group. See torch.distributed, and mail.py.

        It is done when the bytes are in slots of the group's memory: at once for a small tensor, whether or not the
        other rank receives yet. CUDA tensors between two ranks are matched by their order alone, as with NCCL.
        """
        tensor = self._only("send", tensors)
        arguments.check_rank("send", "dst", dst, self._world)
        arguments.check_tensor("send", "tensor", tensor)
        if tensor.device.type != "cpu":
            return self._coalesced(self._on(tensor.device).send(dense(tensor), dst, tag, tensors))
        return self._coalesced(self.transport.mail.send(dense(tensor), dst, tag).of(tensors))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> IrisWork:
        """Receive into a tensor of any layout from rank ``src`` of the group. See torch.distributed, and mail.py.

        The message must have as many bytes as the tensor; its dtype may be another, and its shape is not known.
        """
        arguments.check_rank("recv", "src", src, self._world)
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> IrisWork:
        """Receive as :meth:`recv` does, from whichever rank sends first; ``work.source_rank()`` says which."""
        return self._recv(tensors, None, tag)

    recvAnysource = recv_anysource  # noqa: N815 (torch's name)

    def _recv(self, tensors: list[Tensor], src: int | None, tag: int) -> IrisWork:
        tensor = self._only("recv", tensors)
        arguments.check_output("recv", "tensor", tensor)
        target = room(tensor)
        after = None if target is tensor else lambda: copy([(tensor, target)])
        if tensor.device.type != "cpu":
            if src is None:
                place = where(group=self.transport.links.group, rank=self._rank, op="recv")
                raise UnsupportedError(
                    "recv: a CUDA tensor from any rank; a stream has to be told from which one, as with NCCL; pass "
                    f"src=, or receive into a CPU tensor {place}"
                )
            return self._coalesced(self._on(tensor.device).recv(target, src, tag, tensors, after))
        return self._coalesced(self.transport.mail.recv(target, src, tag, after).of(tensors))
