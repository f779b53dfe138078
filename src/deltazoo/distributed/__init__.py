"""Many devices: plans of tensor parallelism and FSDP2 for delta-rule layers."""
