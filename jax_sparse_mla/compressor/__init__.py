"""The compressor of DeepSeek-V4 and V4.1, and KPool: tokens become fewer rows."""
