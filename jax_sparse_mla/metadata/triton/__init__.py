"""The kernels that build a step's metadata and schedules."""
