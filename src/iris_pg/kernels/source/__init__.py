"""Triton kernels of the cu engine: each rank sends bytes to any of its peers and receives bytes from any of them, in
one launch. One source for GPUs and for Triton's interpreter; :mod:`iris_pg.kernels.loader` loads this package once for
each, so import it from nowhere else.

=================  ===================================================================================================
``exchange``       moves messages between tensors anywhere: a program (CTA) writes chunks of a message into landing
                   slots of the receiver, which copies them out
``zero_copy``      writes messages straight into outputs, or reads them out of inputs, that lie in the symmetric heap
``reduce``         as ``exchange``, and combines what arrives from all ranks, in the order of ranks
``*_words``        the same for small messages: every word travels with its flag, so nothing waits for a fence
=================  ===================================================================================================

They serve every operation: an all-gather sends the same bytes to all peers, a broadcast receives from one, and so on.
What all rely on:

* Flags are counters in the symmetric heap, one for each (CTA, pair of ranks, direction), with one writer and one
  reader. How many messages there were lies in memory of this rank (device-resident epochs), so nothing about a launch
  depends on how many went before, and a replayed launch is right too. They wrap: comparisons look at the sign of a
  32-bit difference.
* Order: all stores of a CTA, a CTA barrier, then a release at system scope on the flag. A waiter acquires at system
  scope, then comes a CTA barrier. One lane for each peer does it, so all peers cost what one does.
* Every CTA moves its own share of every message and waits only for the same CTA of its peers. Launches of a group
  follow each other on every rank, in the same order; no other launch can hold them up for good, however many CTAs of
  this one are resident.
* A wait that lasts looks at the clock and at the ``ABORT`` word; either ends it. Then the CTA is dead: this launch and
  later ones do nothing more in it.
"""

# mypy: ignore-errors

from .exchange import exchange
from .flags import ABORT, COUNTERS, CUDA, ERROR, FLAGS, HIP, INTERPRETED, LINE, WAITING
from .move import CHUNK
from .reduce import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, reduce
from .words import exchange_words, reduce_words
from .zero_copy import zero_copy

__all__ = [
    "ABORT",
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "CHUNK",
    "COUNTERS",
    "CUDA",
    "ERROR",
    "FLAGS",
    "HIP",
    "INTERPRETED",
    "LINE",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "WAITING",
    "exchange",
    "exchange_words",
    "reduce",
    "reduce_words",
    "zero_copy",
]
