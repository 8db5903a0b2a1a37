"""What calls each backend on torch tensors."""
