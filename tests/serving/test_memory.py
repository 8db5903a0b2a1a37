"""What arrays take of a device's memory, and what is refused; over a mesh in test_cli_over_mesh.py."""

import jax
import jax.numpy as jnp
import pytest

from jax_sparse_mla.serving import memory


def test_arrays_larger_than_the_device_are_refused(monkeypatch):
    arrays = {"a": jax.ShapeDtypeStruct((1 << 28, 5), jnp.float32), "b": jnp.zeros(3, jnp.int8)}
    assert memory.size_of(arrays) == (5 << 30) + 3
    monkeypatch.setattr(memory, "device_memory", lambda: 5 << 30)
    with pytest.raises(ValueError, match=r"the weights need 5\.0 GiB, the device has 5\.0 GiB"):
        memory.check_memory("the weights need", memory.size_of(arrays))
    memory.check_memory("the weights need", 5 << 30)
