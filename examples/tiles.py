"""A matrix computed in tiles: each rank puts its tiles straight to their place in every rank's copy of the matrix.

    torchrun --nproc-per-node 4 examples/tiles.py

Twice: with one transfer for each tile, and with one for all tiles of a rank. Peers count the arrivals in a flag.
"""

import time

import torch

from iris_pg import Iris, iris

ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS = 200, 300, 64, 48  # tiles at the edges are smaller


def element(iteration: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the elements at some rows and columns: all differ, and change with the iteration."""
    return (rows[:, None] * COLUMNS + columns + iteration * 0.5).float()


def tiles_of(rank: int, world: int) -> list[tuple[slice, slice]]:
    """Return the rows and columns of a rank's tiles: they are dealt out in turn."""
    corners = [(r, c) for r in range(0, ROWS, TILE_ROWS) for c in range(0, COLUMNS, TILE_COLUMNS)]
    mine = corners[rank::world]
    return [(slice(r, min(r + TILE_ROWS, ROWS)), slice(c, min(c + TILE_COLUMNS, COLUMNS))) for r, c in mine]


def wait_for(flag: torch.Tensor, value: int) -> None:
    """Poll a flag on the host, with a deadline."""
    deadline = time.monotonic() + 60
    while flag.item() < value:
        assert time.monotonic() < deadline, f"{flag.item()} of {value} tiles have arrived"
        time.sleep(0.0001)


def send(ctx: Iris, matrix: torch.Tensor, arrived: torch.Tensor, all_at_once: bool) -> None:
    """Put this rank's tiles of ``matrix`` [ROWS, COLUMNS] into every other rank's."""
    blocks = [matrix[where] for where in tiles_of(ctx.cur_rank, ctx.num_ranks)]
    for hop in range(1, ctx.num_ranks):
        peer = (ctx.cur_rank + hop) % ctx.num_ranks

        def there(tensor: torch.Tensor, peer: int = peer) -> int:
            return ctx.heap.translate(tensor.data_ptr(), ctx.cur_rank, peer)

        if all_at_once:
            ctx.put_tiles(
                [block.data_ptr() for block in blocks],
                peer,
                [there(block) for block in blocks],
                data_size=matrix.element_size(),
                tile_heights=[block.size(0) for block in blocks],
                tile_widths=[block.size(1) for block in blocks],
                src_strides=[matrix.stride(0)] * len(blocks),
                dst_strides=[matrix.stride(0)] * len(blocks),
                signal_flag=there(arrived),
                signal_value=len(blocks),
                async_op=True,
            )
            continue
        for block in blocks:
            height, width = block.size()
            stride = matrix.stride(0)
            flag = there(arrived)
            ctx.put_tile(
                *(block.data_ptr(), peer, there(block), matrix.element_size(), height, width, stride, stride),
                signal_flag=flag,
                async_op=True,
            )


def main() -> None:
    """Run one rank."""
    with iris(heap_size=16 << 20, engines=("sdma",)) as ctx:
        matrix, arrived = ctx.zeros(ROWS, COLUMNS), ctx.zeros(1, dtype=torch.int32)
        mine = tiles_of(ctx.cur_rank, ctx.num_ranks)
        n_tiles = sum(len(tiles_of(rank, ctx.num_ranks)) for rank in range(ctx.num_ranks))
        rows, columns = (torch.arange(n, device=matrix.device) for n in (ROWS, COLUMNS))

        for iteration, all_at_once in enumerate((False, True)):
            for where in mine:
                matrix[where] = element(iteration, rows[where[0]], columns[where[1]])
            send(ctx, matrix, arrived, all_at_once)
            wait_for(arrived, (iteration + 1) * (n_tiles - len(mine)))
            assert torch.equal(matrix, element(iteration, rows, columns)), f"rank {ctx.cur_rank} has a wrong tile"
            ctx.quiet()  # own tiles may be written again when they have left,
            ctx.barrier()  # and those of the others when every rank has read them

        print(f"rank {ctx.cur_rank}: computed {len(mine)} of {n_tiles} tiles", flush=True)
        ctx.barrier()
        if ctx.cur_rank == 0:
            print("ok", flush=True)


if __name__ == "__main__":
    main()
