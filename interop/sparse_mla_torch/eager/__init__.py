"""transformers' models, run eagerly in a process of their own (`python -m sparse_mla_torch.eager`), which the check of
`jax-sparse-mla generate` starts. Nothing here imports JAX: its seconds would be added to torch's."""
