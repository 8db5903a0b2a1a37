"""SGLang's decode step of DeepSeek-V4-Flash's attention, from the kernels in its own wheel; see `benchmarks.peer_step`."""
