"""SGLang's decode step of DeepSeek-V4-Flash's attention, from the kernels of its wheel; see `benchmarks.step`."""
