"""What users pass, checked before any byte moves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iris_pg import arguments
from iris_pg.errors import ArgumentError, UnsupportedError


def raises(kind, message, call, *args):
    with pytest.raises(kind, match=message) as caught:
        call(*args)
    assert type(caught.value) is kind


def test_a_tensor_is_a_dense_cpu_tensor():
    arguments.check_tensor("op", "input", torch.zeros(3)[::2])
    raises(ArgumentError, r"op: input is list; it takes a torch\.Tensor", arguments.check_tensor, "op", "input", [1.0])
    raises(ArgumentError, "input is NoneType", arguments.check_tensor, "op", "input", None)
    raises(
        ArgumentError,
        r"sparse_coo; it takes a dense tensor",
        arguments.check_tensor,
        "op",
        "x",
        torch.zeros(3).to_sparse(),
    )
    raises(
        UnsupportedError,
        "on meta; it takes tensors on the CPU or on a CUDA device",
        arguments.check_tensor,
        "op",
        "x",
        torch.zeros(3, device="meta"),
    )


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(4),
        torch.zeros(0),
        torch.zeros(()),
        torch.zeros(4, 3).t(),
        torch.zeros(9)[::2],
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(1).expand(1, 1, 1),
        torch.zeros(5, 1).expand(5, 1),
        torch.zeros(0, 1).expand(0, 7),
        torch.zeros(6).as_strided((2, 2), (3, 1)),
        torch.zeros(3, 4, 5).permute(2, 0, 1)[1:, ::2],
    ],
)
def test_an_output_with_a_place_for_each_element(output):
    arguments.check_output("op", "output", output)


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(1).expand(4),
        torch.zeros(4).expand(3, 4),
        torch.zeros(4, 1).expand(4, 5),
        torch.zeros(6).as_strided((3, 3), (1, 1)),
        torch.zeros(9).unfold(0, 3, 1),
    ],
)
def test_an_output_whose_elements_share_memory(output):
    raises(
        ArgumentError,
        r"output of size \(.*\) and stride .* share memory",
        arguments.check_output,
        "op",
        "output",
        output,
    )


@st.composite
def views(draw):
    """Views made by slicing, transposing and expanding."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = torch.zeros(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind, dim = (
            draw(st.sampled_from(["slice", "transpose", "expand", "squeeze"])),
            draw(st.integers(0, tensor.dim() - 1)),
        )
        if kind == "slice":
            start = draw(st.integers(0, tensor.size(dim) - 1))
            tensor = tensor.narrow(dim, start, tensor.size(dim) - start)
            steps = [slice(None)] * dim + [slice(None, None, draw(st.integers(1, 3)))]
            tensor = tensor[tuple(steps)]
        elif kind == "transpose":
            tensor = tensor.transpose(dim, draw(st.integers(0, tensor.dim() - 1)))
        elif kind == "expand":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], draw(st.integers(1, 3)), *tensor.shape[dim:])
        elif tensor.dim() > 1 and tensor.size(dim) == 1:
            tensor = tensor.squeeze(dim)
    return tensor


@given(views())
def test_overlap_is_found_exactly(tensor):
    storage = torch.arange(tensor.untyped_storage().nbytes() // 4)
    places = storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).flatten().tolist()
    assert arguments.overlaps_itself(tensor) == (len(set(places)) < len(places))


def test_gathered():
    arguments.check_gathered("op", torch.zeros(6), torch.zeros(2), 3)
    arguments.check_gathered("op", torch.zeros(3, 2), torch.zeros(2), 3)
    arguments.check_gathered("op", torch.zeros(0), torch.zeros(2, 0), 3)
    call = arguments.check_gathered
    raises(
        ArgumentError,
        r"output of size \(5,\) has 5 elements; it takes 3 x 2 for 3 ranks",
        call,
        "op",
        torch.zeros(5),
        torch.zeros(2),
        3,
    )
    raises(
        ArgumentError,
        "output has dtype torch.int32 and the input torch.float32",
        call,
        "op",
        torch.zeros(6, dtype=torch.int32),
        torch.zeros(2),
        3,
    )
    raises(ArgumentError, "share memory", call, "op", torch.zeros(1).expand(6), torch.zeros(2), 3)
    call("op", torch.zeros(6), torch.zeros(1).expand(2), 3)  # an expanded input is fine


def test_lists_and_ranks():
    call = arguments.check_list
    call("op", "output", [torch.zeros(1), torch.zeros(5)], 2, torch.float32)
    raises(
        ArgumentError,
        "output has 1 tensors; it takes one for each of the 2 ranks",
        call,
        "op",
        "output",
        [torch.zeros(1)],
        2,
        torch.float32,
    )
    raises(
        ArgumentError,
        r"output\[1\] has dtype torch.int64",
        call,
        "op",
        "output",
        [torch.zeros(1), torch.zeros(1).long()],
        2,
        torch.float32,
    )
    raises(ArgumentError, r"output\[0\] is int", call, "op", "output", [1, torch.zeros(1)], 2, torch.float32)
    for rank in (-1, 2, 99):
        raises(
            ArgumentError,
            rf"src={rank} is not a rank of this group; it takes 0\.\.1",
            arguments.check_rank,
            "op",
            "src",
            rank,
            2,
        )
    arguments.check_rank("op", "src", 1, 2)


@given(st.integers(-6, 14))
def test_an_input_may_only_be_its_own_part(start):
    storage = torch.zeros(40)
    output, input = storage[10:18], storage[10 + start : 10 + start + 2]
    own = 3 * 2 * 4
    if start == 6 or start <= -2 or start >= 8:
        arguments.check_overlap("op", output, input, own)
    else:
        raises(
            ArgumentError,
            f"overlaps the output at byte {4 * start}; .*at byte {own}",
            arguments.check_overlap,
            "op",
            output,
            input,
            own,
        )


@pytest.mark.parametrize("own", [0, 2])
def test_lists_share_memory_only_in_place(own):
    storage = torch.arange(24)
    outputs = [storage[4 * i : 4 * i + 4] for i in range(3)]
    apart, empty = [storage[12 + 4 * i : 16 + 4 * i] for i in range(3)], storage[1:1]
    for inputs in (apart, apart[:1], [outputs[own]], [*apart[:own], outputs[own], *apart[own + 1 :]], [empty] * 3):
        arguments.check_lists_apart("op", outputs, inputs, own)
        arguments.check_lists_apart("op", outputs[::-1], inputs[::-1], 2 - own)
    for i in range(3):
        for start in (4 * i + 1, 4 * i) if i != own else (4 * i + 1,):
            inputs = [storage[start : start + 2]]
            raises(
                ArgumentError, f"output {i} and input 0 share", arguments.check_lists_apart, "op", outputs, inputs, own
            )
    swapped = outputs[1:] + outputs[:1]
    raises(ArgumentError, "share memory", arguments.check_lists_apart, "op", outputs, swapped, own)
