"""A pipeline of puts: batches go from rank to rank, each adds its part, and no receiver calls anything to receive.

    torchrun --nproc-per-node 4 examples/one_sided_put.py

Every rank has an inbox of two slots. A rank that is done with a batch puts it into the same slot of the next rank::

    rank r      put: wait until taken >= batches that must have left the slot | copy | add 1 to `ready` of rank r + 1
    rank r + 1  wait until ready >= batches that must have come; read the slot; add 1 to `taken` of rank r

Both counters only grow, so nothing is ever reset, and a rank is at most two batches ahead of the next.
"""

import torch

from iris_pg import iris

BATCHES, NUMEL, SLOTS = 50, 4096, 2


def part_of(rank: int, batch: int, device: torch.device) -> torch.Tensor:
    """Return what a rank adds to a batch: it depends on the rank, the batch and the position."""
    return torch.arange(NUMEL, device=device) * (rank + 1) + 1000 * batch


def main() -> None:
    """Run one rank."""
    with iris(heap_size=16 << 20, engines=("sdma",)) as ctx:
        rank, last, device = ctx.cur_rank, ctx.num_ranks - 1, ctx.heap.device
        inbox = ctx.zeros(SLOTS, NUMEL, dtype=torch.int64)
        ready, taken = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
        nothing = inbox[0, :0]  # a put of nothing still waits and signals

        for batch in range(BATCHES):
            slot = inbox[batch % SLOTS]
            if rank == 0:
                slot.zero_()
            else:
                ctx.put(nothing, rank, wait_flag=ready, wait_value=batch + 1)
            slot += part_of(rank, batch, device)

            expected = sum(part_of(r, batch, device) for r in range(rank + 1))
            assert torch.equal(slot, expected), f"batch {batch} on rank {rank} is wrong"

            if rank < last:
                free = max(batch + 1 - SLOTS, 0)  # batches that must have left the next rank's inbox before
                ctx.put(slot, rank + 1, wait_flag=taken, wait_value=free, signal_flag=ready)
            if rank > 0:
                ctx.put(nothing, rank - 1, signal_flag=taken)

        print(f"rank {rank}: {BATCHES} batches of {slot.nbytes} bytes", flush=True)
        ctx.barrier()
        if rank == 0:
            print("ok", flush=True)


if __name__ == "__main__":
    main()
