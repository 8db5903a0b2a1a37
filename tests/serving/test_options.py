"""Options that follow from the model."""

import pytest

from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.options import default_chunk_size
from jax_sparse_mla.serving.presets import CONFIGS, V4_FLASH_SLICE, V32_SLICE


@pytest.mark.parametrize("config, rows", [(V4_FLASH_SLICE, 8192), (V32_SLICE, 4096), (CONFIGS["v4"], 1024)])
def test_a_chunk_gives_an_expert_128_rows(config, rows):
    """256 experts of which a row takes 6 or 8; a small preset has the least chunk."""
    config = Model.from_config(config).config
    assert default_chunk_size(config, 100_000) == rows
    assert default_chunk_size(config, 1) == default_chunk_size(config, 1024) == 1024
    assert default_chunk_size(config, 1500) == min(rows, 2048)
