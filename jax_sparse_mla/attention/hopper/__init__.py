"""Our own attention kernels for Hopper (SM90)."""
