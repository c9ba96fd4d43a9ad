"""The decode-time MoE layer of large models under expert parallelism, without a serving engine."""
