"""FlashAttention-3 for Hopper (sm_90) in Gluon."""
