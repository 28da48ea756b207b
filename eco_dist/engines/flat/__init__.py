"""Engines that cut a run of flat elements: DeepSpeed's partitions and FSDP1's flat parameters."""
