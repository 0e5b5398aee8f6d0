"""Values of GGUF tensors equal those of the `gguf` package, for every slice."""

from __future__ import annotations

import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_models.checkpoints.gguf.blocks import (
    PLAIN,
    check_block_format,
    read_slice,
    readable_formats,
)
from ed_models.checkpoints.gguf.header import Location
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

QUANTIZED = [name for name in readable_formats() if name not in PLAIN]
WRITTEN_BY_LLAMA_QUANTIZE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
SHAPE = (2, 6, 512)
INDEXES = (
    (slice(None),) * 3,
    (slice(1, 2), slice(1, 6, 2), slice(300, 400)),
    (slice(0, 2), slice(3, 4), slice(7, 500, 3)),
    (slice(0, 0), slice(None), slice(None)),
)


def test_formats_of_llama_quantize_are_readable() -> None:
    assert set(WRITTEN_BY_LLAMA_QUANTIZE) <= set(readable_formats())


@pytest.mark.parametrize("name", QUANTIZED)
def test_decoded_slices_equal_those_of_gguf(name: str) -> None:
    form = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[form]
    count = int(np.prod(SHAPE)) // elements * size
    # Random bits: also scales that are infinite or no numbers.
    data = np.random.default_rng(0).integers(0, 256, 32 + count).astype(np.uint8)
    rows = data[32:].reshape(*SHAPE[:-1], -1)
    with np.errstate(all="ignore"):
        expected = dequantize(rows, form).reshape(SHAPE)
    tensor = Location(name, SHAPE, 32, 32 + count)
    for index in INDEXES:
        np.testing.assert_array_equal(
            read_slice(data, tensor, index).view(np.uint32),
            np.ascontiguousarray(expected[index]).view(np.uint32),
        )


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers_are_views_of_the_file(name: str) -> None:
    dtype = PLAIN[name]
    values = np.arange(24).astype(dtype).reshape(2, 3, 4)
    data = np.frombuffer(values.tobytes(), np.uint8)
    found = read_slice(data, Location(name, (2, 3, 4), 0, data.size), (slice(1, 2),) * 3)
    assert np.shares_memory(found, data)
    np.testing.assert_array_equal(found, values[1:2, 1:2, 1:2])


def test_format_without_decoder_raises_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="Q8_K"):
        check_block_format("blk.0.attn_q.weight", "Q8_K")
