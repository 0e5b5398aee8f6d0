"""Counts and bounds of compiled programs, on recorded programs of XLA's compiler for GPUs.

`hlo/decode.txt` is a scan over three layers: a product, a write into a pool [3, 1024, 64], a loop
over pages whose number the program does not contain, and a branch behind the layers.
`hlo/tensor_parallel.txt` is a feed-forward layer over four GPUs, and the gather of an array. Both
were compiled for an H200; their metadata was removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ed_infra.compilation.hlo import HloShape, parse_hlo
from ed_infra.compilation.launches import (
    ChipSpeed,
    Launch,
    LaunchList,
    PageArray,
    list_largest,
    read_group_size,
    report_program,
)

TEXTS = Path(__file__).parent / "hlo"
SPEED = ChipSpeed(4.8e12, 989e12, 1979e12, 2e-6, 450e9, 50e9, node=8)
LAYERS, ROWS, WIDTH, SLOTS = 3, 8, 64, 1024
#: Five tokens of each row: the loop over pages has five iterations.
POOL = PageArray(HloShape("bf16", (SLOTS, WIDTH)), LAYERS, 5 * ROWS * WIDTH * 2)


def read_text(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text("utf-8")


def list_decode(text: str | None = None, **options: bool) -> LaunchList:
    return LaunchList(parse_hlo(text or read_text("decode")), [POOL], **options)


def get_launch(listed: LaunchList, name: str) -> Launch:
    return next(one for one in listed.launches if one.name == name)


def test_launches_are_multiplied_by_the_iterations_of_their_loops():
    report = report_program(list_decode(), SPEED)
    # Three at the entry, seven in each layer, two in each block of pages, and one condition more.
    assert report["launches"] == 3 + LAYERS * (7 + 5 * 2 + 6)
    # The branch returns its input, or has two launches.
    assert report["launches_at_most"] == report["launches"] + 2
    assert report["flops"] == LAYERS * 2 * ROWS * WIDTH * WIDTH


def test_only_loops_without_a_known_number_of_iterations_wait_for_the_host():
    report = report_program(list_decode(), SPEED)
    assert (report["host_loops"], report["host_branches"]) == (LAYERS, 1)
    on_tpu = report_program(list_decode(waits=False), SPEED)
    assert (on_tpu["host_loops"], on_tpu["host_branches"]) == (0, 0)


def test_slices_and_writes_in_place_do_not_count_whole_arrays():
    listed = list_decode()
    weights = get_launch(listed, "loop_dynamic_slice_fusion")
    assert (weights.operation, weights.times) == ("copies", LAYERS)
    assert (weights.read, weights.written) == (WIDTH * WIDTH * 2 + 4, WIDTH * WIDTH * 2)
    write = get_launch(listed, "input_scatter_fusion")
    assert write.operation == "writes at indices"
    assert (write.written, write.pool_read, write.pool_copied) == (ROWS * WIDTH * 2, 0, 0)
    read = get_launch(listed, "loop_add_fusion")
    assert (read.operation, read.times) == ("reads at indices", LAYERS * 5)
    assert read.pool_read == ROWS * WIDTH * 2


def test_copy_of_the_page_pool_is_reported():
    assert report_program(list_decode(), SPEED)["pool_copies"] == 0
    # The compiler adds this instruction if the caller does not donate the pool.
    text = read_text("decode").replace(
        "  %tuple.12 = (",
        "  %copy.30 = bf16[3,1024,64]{2,1,0} copy(%pool.1)\n  %tuple.12 = (",
    )
    report = report_program(
        list_decode(text.replace("copy.24, %pool.1", "copy.24, %copy.30")), SPEED
    )
    assert report["pool_copies"] == 1
    assert report["pool_copied_bytes"] == LAYERS * SLOTS * WIDTH * 2


def test_kernel_that_returns_the_pages_in_place_reads_none_of_them():
    program = """HloModule jit_step, is_scheduled=true

ENTRY %main (rows: bf16[8,64], pool: bf16[1024,64]) -> (bf16[8,64], bf16[1024,64]) {
  %rows = bf16[8,64]{1,0} parameter(0)
  %pool = bf16[1024,64]{1,0} parameter(1)
  ROOT %pallas_call.1 = (bf16[8,64]{1,0}, bf16[1024,64]{1,0}) custom-call(%rows, %pool), \
custom_call_target="__gpu$xla.gpu.triton"ALIAS, metadata={op_name="jit(step)/store/pallas_call"}
}
"""
    pool = PageArray(HloShape("bf16", (1024, 64)), 1, 4096.0)
    for alias, read in (("", 4096), (", output_to_operand_aliasing={{1}: (1, {})}", 0)):
        (launch,) = LaunchList(parse_hlo(program.replace("ALIAS", alias)), [pool]).launches
        assert (launch.read, launch.pool_read) == (8 * 64 * 2 + read, read)
        assert (launch.written, launch.pool_copied) == (8 * 64 * 2, 0)


def test_layer_that_is_sliced_out_of_the_pool_is_a_copy():
    text = read_text("decode").replace("bf16[3,64,64]", "bf16[3,1024,64]")
    text = text.replace("bf16[1,64,64]", "bf16[1,1024,64]")
    text = text.replace("slice_sizes={1,64,64}", "slice_sizes={1,1024,64}")
    report = report_program(list_decode(text), SPEED)
    assert report["pool_copies"] == LAYERS
    assert report["pool_copied_bytes"] == LAYERS * SLOTS * WIDTH * 2


@pytest.mark.parametrize(
    ("dims", "is_pool"),
    [
        ((1024, 16, 4, 2, 128), True),
        ((3, 1024, 16, 4, 2, 128), True),
        ((1, 1024, 16, 4, 2, 128), True),
        ((1024, 4, 16, 2, 128), True),  # permuted
        ((16384, 8, 128), True),  # merged
        ((3072, 16, 1024), True),
        ((128, 1024, 128), False),  # another array of the same size
        ((2048, 16, 4, 2, 64), False),
        ((1024, 16, 4, 2, 64), False),
    ],
)
def test_page_pool_is_recognized_by_its_dimensions(dims: tuple[int, ...], is_pool: bool):
    pool = PageArray(HloShape("bf16", (1024, 16, 4, 2, 128)), 3, 0.0)
    assert pool.matches(HloShape("bf16", dims)) == is_pool
    assert not pool.matches(HloShape("f32", dims))


def test_collectives_count_the_bytes_that_a_device_sends():
    report = report_program(LaunchList(parse_hlo(read_text("tensor_parallel"))), SPEED)
    gathered, summed = 64 * 256 * 4, 512 * 64 * 2
    assert report["collectives"] == {
        "all-gather": {"count": 1, "sent_bytes": 3 * gathered},
        "all-reduce": {"count": 1, "sent_bytes": 2 * summed * 3 / 4},
    }
    assert report["launches"] == 5
    assert report["flops"] == 2 * (2 * 512 * 64 * 32)


def test_bound_is_the_slowest_of_memory_operations_and_link():
    launch = Launch("one", "matrix products", "", 3, 4.8e9, 0.0)
    assert launch.bound_seconds(SPEED) == pytest.approx(3 * (1e-3 + 2e-6))
    compute = Launch("one", "matrix products", "", 1, 4.8e9, 0.0, flops=989e10, bits=16)
    assert compute.bound_seconds(SPEED) == pytest.approx(1e-2 + 2e-6)
    single = Launch("one", "matrix products", "", 1, 0.0, 0.0, flops=989e10, bits=32)
    assert single.bound_seconds(SPEED) == pytest.approx(2e-2 + 2e-6)
    inside = Launch("one", "all-reduce", "", 1, 0.0, 0.0, sent=450e6, group=8)
    between = Launch("one", "all-reduce", "", 1, 0.0, 0.0, sent=450e6, group=16)
    assert inside.bound_seconds(SPEED) == pytest.approx(1e-3 + 2e-6)
    assert between.bound_seconds(SPEED) == pytest.approx(9e-3 + 2e-6)


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 4),
        ("replica_groups=[2,4]<=[8], dimensions={0}", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", 2),
        ("replica_groups=mesh['a'=2,'b'=8] {'b'}, to_apply=%add", 8),
        ("replica_groups=mesh['a'=2,'b'=8] {'a','b'}, to_apply=%add", 16),
        ("replica_groups=mesh['a'=2,'b'=8] {'b':(2)4}, to_apply=%add", 4),
        ("source_target_pairs={{0,1},{1,0}}", 2),
        ("channel_id=1", 1),
    ],
)
def test_group_of_a_collective_is_read_in_every_notation(attributes: str, size: int):
    assert read_group_size(attributes) == size


_CALL = """HloModule m

ENTRY %main (q: bf16[2,8,4,64], pool: bf16[1024,64]) -> bf16[2,8,4,64] {
  %q = bf16[2,8,4,64]{3,2,1,0} parameter(0)
  %pool = bf16[1024,64]{1,0} parameter(1)
"""


@pytest.mark.parametrize(
    ("line", "operation", "flops", "read"),
    [
        (
            '  ROOT %c = bf16[2,8,4,64]{3,2,1,0} custom-call(%q, %pool), custom_call_target="'
            '__gpu$xla.gpu.triton", metadata={op_name="jit(f)/prompt_attention/pallas_call"}',
            *("kernel prompt_attention", 0, 8192 + POOL.step_bytes),
        ),
        (
            "  ROOT %c = (bf16[64,16]{1,0}, s8[64]{0}) custom-call(%q, %pool), custom_call_target="
            '"__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{'
            '"lhs_contracting_dimensions":["3"],"rhs_contracting_dimensions":["1"]}}}',
            *("matrix products", 2 * 64 * 16 * 64, 8192 + POOL.step_bytes),
        ),
        (
            "  ROOT %c = bf16[2,4,8,64]{3,2,1,0} custom-call(%q, %q), custom_call_target="
            '"__cudnn$fmhaSoftmax", backend_config={"mask_type":"CAUSAL",'
            '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","8","8"]}}',
            *("attention of cuDNN", 2 * 2 * 2 * 4 * 8 * 8 * 64 / 2, 2 * 8192),
        ),
        (
            "  ROOT %c = bf16[16,32]{1,0} convolution(%q, %pool), dim_labels=bf_oi->bf",
            *("matrix products", 2 * 16 * 32 * 64, 8192 + 131072),
        ),
    ],
)
def test_calls_of_libraries_have_operations(line: str, operation: str, flops: float, read: float):
    listed = LaunchList(parse_hlo(f"{_CALL}{line}\n}}\n"), [POOL])
    (launch,) = listed.launches
    assert (launch.operation, launch.flops, launch.read) == (operation, flops, read)
    assert [*list_largest(listed, SPEED, 3)] == [launch]


def test_sort_in_place_on_a_gpu_has_a_copy_of_its_input():
    text = """HloModule m

%sorted (p: f32[16,512]) -> f32[16,512] {
  %p = f32[16,512]{1,0} parameter(0)
  ROOT %s = f32[16,512]{1,0} sort(%p), dimensions={1}, to_apply=%less
}

ENTRY %main (x: f32[16,512]) -> f32[16,512] {
  %x = f32[16,512]{1,0} parameter(0)
  ROOT %fusion = f32[16,512]{1,0} fusion(%x), kind=kCustom, calls=%sorted
}
"""
    assert [one.operation for one in LaunchList(parse_hlo(text)).launches] == ["sort", "copies"]


def test_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        parse_hlo("HloModule empty\n")
