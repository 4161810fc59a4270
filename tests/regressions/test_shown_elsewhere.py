"""Reports of other systems whose kind of fault is kept out by a test that lies where its subject is tested.

A report is listed with that test; this fails when it has gone or has another name.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

SHOWN = {
    "gloo #520, pytorch #75512: a peer dies and survivors hang": [
        "ranks/test_failures.py::test_a_rank_that_is_killed_is_named_by_all_others",
        "ranks/test_failures.py::test_a_rank_that_is_killed_in_set_up_is_named_by_all_others",
        "ranks/test_p2p.py::test_a_rank_that_is_killed_is_named",
    ],
    "pytorch #156627: a list of outputs of different sizes is refused": [
        "ranks/test_backend.py::test_all_gather_into_a_list_takes_any_sizes",
    ],
    "pytorch #152594: a factor in FSDP2": [
        "ranks/test_framework_fsdp2.py::test_a_divide_factor_is_a_factor_of_the_sum",
    ],
    "pytorch #148344: types of 8 bits, and the size of any type": [
        "ranks/test_all_gather.py::test_every_dtype_size_and_form_is_what_gloo_gathers",
    ],
    "pytorch #190977: ranks allocate in different orders": [
        "ranks/test_mismatches.py::test_ranks_that_allocate_differently_are_all_told",
    ],
    "sglang #36943: an exchange of handles never times out": [
        "ranks/test_failures.py::test_a_rank_that_is_killed_in_set_up_is_named_by_all_others",
        "ranks/test_failures.py::test_a_rank_that_does_not_come_to_set_up_is_named_by_all",
    ],
    "nccl #2331: registrations are exhausted": [
        "ranks/test_all_gather.py::test_thousands_of_tensors_cost_no_descriptor_and_no_mapping",
        "ranks/test_all_gather.py::test_thousands_of_heap_tensors_cost_no_descriptor_and_no_mapping",
    ],
    "iris #462: a flag at the scope of one GPU": [
        "unit/test_kernels.py::test_flags_are_released_and_acquired_at_system_scope",
    ],
    "iris #426: a size of zero copies the maximum": [
        "ranks/test_one_sided.py::test_put_in_every_form",
        "unit/test_context.py::test_an_empty_tile_copies_nothing_waits_and_signals",
        "unit/test_packets.py::test_refused",
    ],
    "rocm-xio: a size of 1 to 4 GiB is truncated": [
        "unit/test_context.py::test_a_large_put_is_split_without_a_gap",
        "unit/test_packets.py::test_a_split_copy_is_contiguous_and_complete",
        "unit/test_xio.py::test_sizes_above_the_field_are_split",
    ],
    "iris: wrong bits for the operation of an atomic": [
        "unit/test_packets.py::test_every_atomic_operation_code",
        "unit/test_decoder.py::test_atomic_headers",
    ],
    "rocm-xio: source and destination are swapped between versions": [
        "unit/test_packets.py::test_copies_take_keywords_only",
        "unit/test_xio.py::test_a_library_that_does_something_else_is_caught_before_it_moves_data",
        "ranks/test_xio.py::test_all_gather_is_what_gloo_gathers",
    ],
    "mori #623: a rank is taken for the number of a device": [
        "unit/test_hip.py::test_gpus_are_told_by_their_pci_address",
        "unit/test_device_queues.py::test_numbers_are_of_pci_addresses_and_not_of_ranks",
        "unit/test_kfd.py::test_the_table_of_sockets_is_that_of_the_kernel",
    ],
    "rocm-systems #11318: a copy without compute units is skipped": [
        "unit/test_hip.py::test_a_copy_that_is_skipped_is_noticed",
    ],
    "the count of a NOP has 14 bits and not 16": [
        "unit/test_packets.py::test_pads_are_as_few_nops_as_the_count_allows",
    ],
    "rocm-systems #11544: the engine runs ahead of the doorbell": [
        "unit/test_ring.py::test_nothing_runs_before_the_doorbell",
    ],
    "rocm-systems #326, #7896: a full queue, or a lost completion, blocks for ever": [
        "unit/test_ring.py::test_a_full_ring_with_a_stopped_engine",
        "unit/test_ring.py::test_a_full_ring_whose_first_packet_waits_for_ever",
        "unit/test_xio.py::test_a_batch_longer_than_the_ring_never_fills_it",
        "unit/test_xio.py::test_a_full_ring_ends_at_the_deadline",
    ],
    "quiet compares with == and hangs with two producers": [
        "ranks/test_one_sided.py::test_four_threads_put_and_wait",
    ],
    "mori: a put and its signal are reserved apart": [
        "ranks/test_one_sided.py::test_a_signal_is_never_seen_before_its_copy",
        "ranks/test_xio.py::test_a_signal_is_never_seen_before_its_copy",
    ],
}


@pytest.mark.parametrize("report", SHOWN)
def test_a_test_shows_that_it_cannot_happen(report):
    for place in SHOWN[report]:
        file, name = place.split("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place
